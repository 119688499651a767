"""The model that Transformers makes of a checkpoint, by whose names and classes PEFT goes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from isthmus.checkpoints.ties import config_ties, input_embedding, is_output_embedding

NAMELESS_OUTPUT = "its output embedding"
"""Stands for the name of an output embedding where only Transformers could tell it."""

# Parts of the names of architectures that have an output embedding.
_LANGUAGE_MODEL = re.compile("LM|Generation|PreTraining")


class Kind(Enum):
    """What LoRA can be put on."""

    LINEAR = "linear"
    CONV1D = "GPT-2's linear layer, with a weight of shape [inputs, outputs]"
    EMBEDDING = "embedding"
    CONVOLUTION = "convolution"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a checkpoint's tensors and modules are in memory.

    Attributes:
        names: Stored names and those in memory, without tensors that are fused or split.
        kinds: Every module, and what it is to LoRA; None if LoRA cannot be put on it.
        tied: Names in memory of weights that are not stored, and the stored name of the tensor
            whose numbers each shares.
    """

    names: Mapping[str, str]
    kinds: Mapping[str, Kind | None]
    tied: Mapping[str, str]


def loaded_model(config: Mapping[str, Any] | None, names: Iterable[str]) -> LoadedModel | None:
    """What the installed Transformers makes of a checkpoint.

    Since version 5 it renames some models' modules while loading and back while saving (ViT's
    `encoder.layer.0.attention.attention.query` is `layers.0.attention.q_proj` in memory), and fuses
    others. The model is built without any numbers.

    Args:
        config: The checkpoint's `config.json`.
        names: Stored names.

    Returns:
        None where Transformers is missing, older than version 5, or does not know the architecture.
    """
    try:
        model, renamings, converters, rename = _build(config or {})
        state = model.state_dict()
        found = {
            name: rename(name, renamings, converters, model.base_model_prefix, state)
            for name in names
        }
    except Exception:  # whatever a library says about a configuration that it does not know
        return None
    loaded = {name: there for name, (there, fused) in found.items() if fused is None}
    return LoadedModel(
        names=loaded,
        kinds={name: _kind(module) for name, module in model.named_modules()},
        tied=_tied(model, {there: name for name, there in loaded.items()}),
    )


def unstored_ties(
    config: Mapping[str, Any] | None, names: Collection[str], loaded: LoadedModel | None
) -> Mapping[str, str]:
    """The weights that a checkpoint lacks because another tensor of it takes their place.

    Args:
        config: The checkpoint's `config.json`.
        names: Stored names.
        loaded: What Transformers makes of them.

    Returns:
        Their names in memory, and the stored tensor's name for each. Without Transformers an output
        embedding is `NAMELESS_OUTPUT`, and exists if the configuration ties it and the architecture
        sounds like a language model.
    """
    if loaded is not None:
        return loaded.tied
    architecture = str(((config or {}).get("architectures") or ["LM"])[0])
    embedding = input_embedding(names)
    if (
        embedding is None
        or not config_ties(config)
        or not _LANGUAGE_MODEL.search(architecture)
        or any(is_output_embedding(name) for name in names)
    ):
        return {}
    return {NAMELESS_OUTPUT: embedding}


def _build(config: Mapping[str, Any]) -> tuple[Any, list[Any], list[Any], Any]:
    """The model without numbers, and how its names are changed."""
    import torch
    import transformers
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    architecture = getattr(transformers, config["architectures"][0])
    settings = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
    with torch.device("meta"):
        model = architecture(settings)
    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    return model, renamings, converters, rename_source_key


def _tied(model: Any, stored: Mapping[str, str]) -> dict[str, str]:
    """Weights that share their numbers with a stored one; `stored` by the names in memory."""
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.endswith(".weight"):
            shared.setdefault(id(parameter), []).append(name)
    return {
        name: stored[kept[0]]
        for names in shared.values()
        if (kept := [name for name in names if name in stored])
        for name in names
        if name not in stored
    }


def _kind(module: Any) -> Kind | None:
    from torch import nn

    if isinstance(module, nn.Linear):
        return Kind.LINEAR
    if isinstance(module, nn.Embedding):
        return Kind.EMBEDDING
    # PEFT's B mixes all outputs, which groups keep apart.
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1:
        return Kind.CONVOLUTION
    return Kind.CONV1D if type(module).__name__ == "Conv1D" else None
