"""The model that Transformers makes of a checkpoint, by whose names and classes PEFT goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


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
    """

    names: Mapping[str, str]
    kinds: Mapping[str, Kind | None]


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
    return LoadedModel(
        names={name: loaded for name, (loaded, fused) in found.items() if fused is None},
        kinds={name: _kind(module) for name, module in model.named_modules()},
    )


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
