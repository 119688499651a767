"""The symmetries of known architectures, from their configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from isthmus.errors import SymmetryError
from isthmus.symmetry.architectures import decoders, encoders
from isthmus.symmetry.architectures.architecture import Architecture, Norm, Reader, Residual
from isthmus.symmetry.architectures.builder import Builder

__all__ = ["FAMILIES", "Architecture", "Norm", "Reader", "Residual", "architecture_of"]

_TOKENS, _BLOCKS = "embed_tokens.weight", "embeddings.word_embeddings.weight"

FAMILIES: Mapping[str, tuple[Callable[[Builder], None], str]] = {
    "llama": (decoders.llama, _TOKENS),
    "mistral": (decoders.llama, _TOKENS),
    "qwen2": (decoders.llama, _TOKENS),
    "qwen3": (decoders.llama, _TOKENS),
    "phi3": (decoders.llama, _TOKENS),
    "gemma": (decoders.gemma, _TOKENS),
    "gemma2": (decoders.gemma, _TOKENS),
    "gemma3_text": (decoders.gemma, _TOKENS),
    "phi": (decoders.phi, _TOKENS),
    "gpt2": (decoders.gpt2, "wte.weight"),
    "gpt_neox": (decoders.gpt_neox, "embed_in.weight"),
    "bert": (encoders.bert, _BLOCKS),
    "roberta": (encoders.bert, _BLOCKS),
    "xlm-roberta": (encoders.bert, _BLOCKS),
    "distilbert": (encoders.distilbert, _BLOCKS),
    "vit": (encoders.vit, "embeddings.cls_token"),
}
"""By model type, what tells its tensors and the end of the name of one that it always has."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def architecture_of(
    config: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]],
    *,
    residual: Residual = "auto",
) -> Architecture:
    """The symmetries of a network that is described by its configuration.

    Args:
        config: As in `config.json`.
        shapes: Of every tensor, by its name in the checkpoint; tied tensors stand once.
        residual: The group of the residual stream. ``auto`` takes the largest that keeps norms as they
            are: signed permutations with RMSNorm, permutations with LayerNorm. ``orthogonal`` is for
            tensors that `absorb_norms` gave. ``none`` leaves the stream alone, which ``auto`` does where
            the network's output is the stream itself, as of an encoder without a head.

    Raises:
        SymmetryError: for an unknown family, tensors that the family does not have, or a group that
            does not fit.
    """
    family = _family(config, shapes)
    tell, anchor = FAMILIES[family]
    build = Builder(config, shapes, residual, anchor)
    tell(build)
    if not build.has_outputs and build.residual != "none":
        if residual != "auto":
            raise SymmetryError(
                f"The network has no head, so that its output is the axis 'residual', on which "
                f"{residual!r} would act",
                "Leave the stream alone (residual 'none'), or take a model with its head.",
            )
        build = Builder(config, shapes, "none", anchor)
        tell(build)
    return build.finish(family)


def _family(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> str:
    family = config.get("model_type")
    names = config.get("architectures") or [""]
    known = ", ".join(FAMILIES)
    if family is None:
        # Old configurations lack the type, which the class or the tensors imply.
        lowered = names[0].lower()
        of_class = next((one for one in ("roberta", "bert", "gpt2") if lowered.startswith(one)), "")
        layer = "encoder.layer.0.attention.self.query.weight"
        of_names = "bert" if any(name.endswith(layer) for name in shapes) else ""
        family = of_class or (of_names if not names[0] else "")
    if any(config.get(key) for key in _EXPERTS) or "moe" in str(family) or family == "mixtral":
        raise SymmetryError(
            f"Models of type {family!r} are mixtures of experts, whose symmetries are not known here",
            f"Known are: {known}.",
        )
    if config.get("is_encoder_decoder"):
        raise SymmetryError(
            f"Models of type {family!r} are an encoder with a decoder, whose symmetries are not "
            "known here",
            f"Known are: {known}.",
        )
    if family not in FAMILIES:
        raise SymmetryError(
            f"The symmetries of models of type {family!r} are not known here",
            f"Known are: {known}. For others write a Spec by hand, or trace the module.",
        )
    return str(family)
