"""How PEFT stores a LoRA adapter: names and shapes of its tensors, and its configuration."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.checkpoints.adapter import PREFIX
from isthmus.checkpoints.base import TensorInfo
from isthmus.checkpoints.dtypes import Dtype
from isthmus.errors import PlanError

# What an output says as its donor does: where it belongs, and how its base stores matrices.
_KEPT = (
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "fan_in_fan_out",
    "revision",
    "task_type",
)


@dataclass(frozen=True, slots=True)
class ModuleUpdate:
    """What an output adapter says about one module.

    Attributes:
        module: Its name in the base model.
        rank: At least 1.
        shape: Outputs and inputs, the latter channels times kernel for a convolution; for an
            embedding its width and its tokens.
        kernel: The shape of a convolution's kernel, None for other modules.
        embedding: Whether the module is an embedding.
        bias: Whether something is added to the module's bias.
    """

    module: str
    rank: int
    shape: tuple[int, int]
    kernel: tuple[int, ...] | None = None
    embedding: bool = False
    bias: bool = False


@dataclass(frozen=True, slots=True)
class StoredFactors:
    """The stored tensors of one module.

    Attributes:
        a: A, of shape [rank, inputs], or [rank, channels, *kernel].
        b: B, of shape [outputs, rank], followed by ones for a convolution.
        bias: What is added to the module's bias, of shape [outputs], or None.
    """

    a: TensorInfo
    b: TensorInfo
    bias: TensorInfo | None


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """Everything that an adapter stores.

    Attributes:
        factors: By module.
        replaced: Tensors stored in full, by their names in the base model.
    """

    factors: Mapping[str, StoredFactors]
    replaced: Mapping[str, TensorInfo]

    def of_module(self, update: ModuleUpdate) -> StoredFactors:
        """The stored tensors of a module."""
        return self.factors[update.module]

    def of_tensor(self, info: TensorInfo) -> TensorInfo:
        """What a tensor of the base model is stored as."""
        return self.replaced[info.name]


def adapter_tensors(
    updates: Sequence[ModuleUpdate], replaced: Sequence[TensorInfo], dtype: Dtype
) -> AdapterTensors:
    """PEFT's names and shapes for an adapter's tensors.

    Args:
        updates: The modules that it updates.
        replaced: Tensors of the base model that it stores in full, in their own formats.
        dtype: The format of factors and added biases.
    """
    adapted = {update.module for update in updates}
    return AdapterTensors(
        factors={update.module: _factors(update, dtype) for update in updates},
        replaced={
            info.name: TensorInfo(_full_name(info.name, adapted), info.dtype, info.shape)
            for info in replaced
        },
    )


def adapter_config(
    donor: Mapping[str, Any], updates: Sequence[ModuleUpdate], replaced_modules: Sequence[str]
) -> str:
    """The text of an `adapter_config.json` that `PeftModel.from_pretrained` loads.

    The scaling is 1 in every module: alpha is the rank. The commonest rank stands under `r`, others
    in `rank_pattern` and `alpha_pattern`, by regular expressions that fit one module each.

    Args:
        donor: The configuration of another adapter, or parts of one. The base model's name and the
            task come from it, and whether the base stores matrices as [inputs, outputs].
        updates: The modules that the adapter updates, at least one.
        replaced_modules: The modules that it stores in full, with every tensor that they have.

    Raises:
        PlanError: if there is no update, or biases and embeddings would have to be in one adapter.
    """
    if not updates:
        raise PlanError(
            "the adapter would change no module", "PEFT has no adapters without LoRA in them."
        )
    biased = any(update.bias for update in updates)
    embedding = next((update.module for update in updates if update.embedding), None)
    if biased and embedding is not None:
        raise PlanError(
            f"the adapter would have biases of its own (lora_bias) and update the embedding "
            f"{embedding}; PEFT loads no such adapter",
            "Leave the embedding or the biases out, or write a whole model.",
        )
    counts = Counter(update.rank for update in updates)
    usual = max(counts, key=lambda rank: (counts[rank], rank))
    pattern = {
        f"^{re.escape(update.module)}": update.rank for update in updates if update.rank != usual
    }
    config = {
        "alpha_pattern": pattern,
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": usual,
        "lora_bias": biased,
        "lora_dropout": 0.0,
        "modules_to_save": list(replaced_modules) or None,
        "peft_type": "LORA",
        "r": usual,
        "rank_pattern": pattern,
        "target_modules": [update.module for update in updates],
        "use_dora": False,
        "use_rslora": False,
    } | {key: donor[key] for key in _KEPT if donor.get(key) is not None}
    return json.dumps(config, indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def _factors(update: ModuleUpdate, dtype: Dtype) -> StoredFactors:
    outputs, inputs = update.shape
    stem = f"{PREFIX}{update.module}.lora_"
    if update.embedding:
        names = f"{stem}embedding_A", f"{stem}embedding_B"
    else:
        names = f"{stem}A.weight", f"{stem}B.weight"
    a: tuple[int, ...] = (update.rank, inputs)
    b: tuple[int, ...] = (outputs, update.rank)
    if update.kernel is not None:
        a = (update.rank, inputs // math.prod(update.kernel), *update.kernel)
        b += (1,) * len(update.kernel)
    return StoredFactors(
        a=TensorInfo(names[0], dtype, a),
        b=TensorInfo(names[1], dtype, b),
        bias=TensorInfo(f"{stem}B.bias", dtype, (outputs,)) if update.bias else None,
    )


def _full_name(name: str, adapted: set[str]) -> str:
    module, _, part = name.rpartition(".")
    # A module with LoRA is the inner layer of a wrapper.
    return f"{PREFIX}{module}.base_layer.{part}" if module in adapted else f"{PREFIX}{name}"
