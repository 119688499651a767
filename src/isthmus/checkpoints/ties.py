"""Names that share their numbers by the model's configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from isthmus.checkpoints.base import TensorInfo

INPUT_EMBEDDINGS = (
    "shared.weight",
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
    "embed_in.weight",
    "word_embedding.weight",
)
"""Ends of the names of input embeddings; the first one that a model has counts."""

OUTPUT_EMBEDDINGS = (
    "lm_head.weight",
    "lm_head.decoder.weight",
    "embed_out.weight",
    "predictions.decoder.weight",
    "generator_lm_head.weight",
    "vocab_projector.weight",
    "output.weight",
)
"""Names of output embeddings, with any prefix of the model before them."""


def config_ties(config: Mapping[str, Any] | None) -> bool:
    """Whether a model's configuration says outright that input and output embedding are one.

    Many architectures tie them when nothing is said; but then a stored output embedding is the
    only thing that one can know.
    """
    if config is None:
        return False
    text = config.get("text_config")
    return config.get("tie_word_embeddings") is True or (
        "tie_word_embeddings" not in config
        and isinstance(text, Mapping)
        and text.get("tie_word_embeddings") is True
    )


def input_embedding(names: Collection[str]) -> str | None:
    """The name of the input embedding, or None when there is none or more than one."""
    for ending in INPUT_EMBEDDINGS:
        found = [name for name in names if _ends(name, ending)]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def is_output_embedding(name: str) -> bool:
    """Whether a tensor of this name is an output embedding."""
    return any(_ends(name, ending) for ending in OUTPUT_EMBEDDINGS)


def tied_by_config(
    tensors: Mapping[str, TensorInfo], config: Mapping[str, Any] | None
) -> dict[str, str]:
    """Stored output embeddings that Transformers does not load, for the input's takes their place.

    Returns:
        Their names, and the input embedding's for each; empty unless the configuration ties them.
    """
    if not config_ties(config):
        return {}
    embedding = input_embedding(tensors)
    if embedding is None:
        return {}
    shape = tensors[embedding].shape
    return {
        name: embedding
        for name, info in tensors.items()
        if name != embedding and is_output_embedding(name) and info.shape == shape
    }


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")
