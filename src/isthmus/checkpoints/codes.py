"""Quantised weights, whose stored numbers are codes. Merging codes would be meaningless."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.checkpoints.base import TensorInfo
from isthmus.errors import CheckpointError

_SCALE_ENDINGS = ("_scale_inv", "_scale")


def refuse_codes(
    label: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any] | None
) -> None:
    """Refuse a model whose weights are codes that mean something only with their scales.

    Plain float8 weights without scales are numbers like any others, and pass.

    Raises:
        CheckpointError: if the configuration says that the model is quantised, or scale tensors
            lie beside weights.
    """
    quantisation = (config or {}).get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else None
        raise CheckpointError(
            f"{label} is quantised ({method or 'quantization_config in its config.json'}); "
            "its stored weights are codes, which cannot be merged",
            "Use the original model, or dequantise it first: in Transformers, load it and save "
            "model.dequantize().",
        )
    for name in tensors:
        for ending in _SCALE_ENDINGS:
            weight = tensors.get(name.removesuffix(ending))
            if name.endswith(f".weight{ending}") and weight and weight.dtype.itemsize == 1:
                raise CheckpointError(
                    f"{label}: {weight.name!r} is stored as {weight.dtype.value} codes, with their "
                    f"scale in {name!r}; codes cannot be merged",
                    "Dequantise the model first: multiply the weights by their scales and save "
                    "them in bfloat16.",
                )
