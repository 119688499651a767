"""Opening LoRA adapters in PEFT's layout: factors and scales, without their products."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.checkpoints.adapter_files import open_adapter_weights
from isthmus.checkpoints.base import SourceFile, TensorInfo
from isthmus.checkpoints.index import inside, read_json
from isthmus.closing import Closing
from isthmus.errors import CheckpointError
from isthmus.typing import FloatArray

ADAPTER_CONFIG = "adapter_config.json"

# PEFT wraps the model twice, and its names say so.
PREFIX = "base_model.model."
_FACTOR = re.compile(
    r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<factor>[AB])(\.weight)?"
    r"|(?P<biased>.+)\.lora_B\.bias"
)

# Settings that change what the factors mean, and what people call them.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
    "layer_replication": "layer replication",
    "target_parameters": "LoRA on bare parameters (target_parameters)",
    "trainable_token_indices": "trainable tokens",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
_LARGEST = float(np.finfo(np.float32).max)

# Other ways to begin take something out of the base model, and the adapter fits only what is left.
_HARMLESS_BEGINNINGS = (True, False, None, "true", "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """The update of one module's weight: `scaling * B @ A`, transposed for an embedding.

    Attributes:
        module: The module's name in the base model.
        a: The stored A, of shape [rank, inputs], or [rank, channels, *kernel] for a convolution.
        b: The stored B, of shape [outputs, rank], followed by ones for a convolution.
        scaling: The factor before the product, and before the bias.
        embedding: Whether the module is an embedding; then A's columns are the tokens.
        fan_in_fan_out: Whether the base's weight is said to be of shape [inputs, outputs].
        kernel: The shape of a convolution's kernel, None for other modules.
        bias: What is added to the module's bias after scaling, of shape [outputs], or None.
    """

    module: str
    a: TensorInfo
    b: TensorInfo
    scaling: float
    embedding: bool
    fan_in_fan_out: bool
    kernel: tuple[int, ...] | None = None
    bias: TensorInfo | None = None

    @property
    def rank(self) -> int:
        """The rank of the factors."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of `B @ A`: outputs and inputs, the latter channels times kernel."""
        return self.b.shape[0], math.prod(self.a.shape[1:])


class Adapter(Closing):
    """An opened LoRA adapter. Reading is safe from several threads at once.

    Attributes:
        label: The adapter as the user wrote it.
        path: Its folder.
        config: The parsed `adapter_config.json`.
        updates: The low-rank updates by module, named as in the base model.
        replaced: Tensors that the adapter stores in full (`modules_to_save`, trained biases):
            the base's name for each, and what is stored.
        sources: The adapter's files.
    """

    def __init__(self, path: Path, label: str) -> None:
        self.label = label
        self.path = path
        config_path = inside(path, ADAPTER_CONFIG)
        if not config_path.exists():
            raise CheckpointError(
                f"{label} is no adapter: "
                + (
                    f"it has no {ADAPTER_CONFIG}" if path.is_dir() else "it is a file, not a folder"
                ),
                f"What follows a plus sign is the folder of a LoRA adapter, with {ADAPTER_CONFIG} "
                "in it. List another model by itself.",
            )
        self.config: Mapping[str, Any] = read_json(config_path)
        _check_supported(self.config, label)
        self._homes = open_adapter_weights(path)
        if not self._homes:
            raise CheckpointError(
                f"the weights of {label} hold no tensor", "Download the adapter again."
            )
        self.sources = (
            SourceFile.of(config_path, config_path.stat()),
            *(file.source for file in dict.fromkeys(self._homes.values())),
        )
        factors: dict[tuple[str, bool], dict[str, TensorInfo]] = {}
        biases: dict[str, TensorInfo] = {}
        self.replaced: dict[str, TensorInfo] = {}
        for stored, file in self._homes.items():
            info = file.tensors[stored]
            name = stored.removeprefix(PREFIX)
            match = _FACTOR.fullmatch(name)
            if match and match["biased"]:
                biases[match["biased"]] = info
            elif match:
                key = match["module"], match["embedding"] is not None
                factors.setdefault(key, {})[match["factor"]] = info
            elif ".lora_" in name:
                raise CheckpointError(
                    f"{label} holds {stored!r}, which is no part of a plain LoRA adapter", _CURE
                )
            elif ".original_module." not in name:  # the base's own tensor, kept for comparison
                plain = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
                self.replaced[plain] = info
        self.updates = {
            module: self._update(module, embedding, pair, biases.pop(module, None))
            for (module, embedding), pair in factors.items()
        }
        if biases:
            raise CheckpointError(
                f"{label} holds the bias of lora_B of {min(biases)} without its factors",
                "The adapter is damaged; download it again.",
            )

    def read(self, info: TensorInfo, start: int, out: FloatArray) -> None:
        """Decode elements `start : start + out.size` of one of the stored tensors into `out`.

        Raises:
            CheckpointError: if the file was changed or cut since it was opened.
        """
        self._homes[info.name].read(info.name, start, out)

    def factor(self, info: TensorInfo, dtype: np.dtype[Any]) -> FloatArray:
        """All of an A, B or bias in its stored shape, in float32 or float64.

        Raises:
            CheckpointError: if the file was changed or cut since it was opened.
        """
        values = np.empty(info.numel, dtype)
        self.read(info, 0, values)
        return values.reshape(info.shape)

    def close(self) -> None:
        """Release the files. Closing twice is allowed."""
        for file in dict.fromkeys(self._homes.values()):
            file.close()

    def _update(
        self,
        module: str,
        embedding: bool,
        factors: Mapping[str, TensorInfo],
        bias: TensorInfo | None,
    ) -> LowRankUpdate:
        if factors.keys() != {"A", "B"}:
            raise CheckpointError(
                f"{self.label} holds lora_{min(factors)} of {module} without its other half",
                "The adapter is damaged; download it again.",
            )
        a, b = factors["A"], factors["B"]
        kernel = a.shape[2:] or None
        if len(a.shape) < 2 or len(a.shape) != len(b.shape) or {*b.shape[2:]} - {1}:
            raise CheckpointError(
                f"{self.label} adapts {module} by factors of shapes {list(a.shape)} and "
                f"{list(b.shape)}, which are neither matrices nor a convolution and a 1x1 one",
                _CURE,
            )
        rank = self._setting("rank_pattern", "r", module)
        if kernel and a.shape[0] == rank and 0 < b.shape[1] < rank and rank % b.shape[1] == 0:
            raise CheckpointError(
                f"{self.label} adapts {module} by factors of shapes {list(a.shape)} and "
                f"{list(b.shape)}: LoRA on a convolution in groups",
                _CURE,
            )
        if not (a.dtype.is_float and b.dtype.is_float):
            raise CheckpointError(
                f"{self.label}: the factors of {module} are in {a.dtype.value} and {b.dtype.value}, "
                "which are no floating-point numbers",
                "The adapter is quantised or damaged; download it in another format.",
            )
        if not a.shape[0] == b.shape[1] == rank:
            raise CheckpointError(
                f"{self.label}: the factors of {module} have shapes {list(a.shape)} and "
                f"{list(b.shape)}, but by {ADAPTER_CONFIG} their rank is {rank} (r or rank_pattern; 8 "
                "if r is missing)",
                "Weights and configuration belong to different adapters.",
            )
        self._check_bias(module, b, bias)
        alpha = self._setting("alpha_pattern", "lora_alpha", module)
        divisor = math.sqrt(rank) if self.config.get("use_rslora") else rank
        return LowRankUpdate(
            module=module,
            a=a,
            b=b,
            scaling=alpha / divisor,
            embedding=embedding,
            fan_in_fan_out=bool(self.config.get("fan_in_fan_out")),
            kernel=kernel,
            bias=bias,
        )

    def _check_bias(self, module: str, b: TensorInfo, bias: TensorInfo | None) -> None:
        if bias is None:
            return
        if not self.config.get("lora_bias"):
            raise CheckpointError(
                f"{self.label} holds a bias of lora_B of {module}, but {ADAPTER_CONFIG} does not say "
                "lora_bias",
                "Weights and configuration belong to different adapters.",
            )
        if bias.shape != b.shape[:1] or not bias.dtype.is_float:
            raise CheckpointError(
                f"{self.label}: the bias of lora_B of {module} is {list(bias.shape)} in "
                f"{bias.dtype.value}, and should be {[b.shape[0]]}",
                "The adapter is damaged; download it again.",
            )

    def _setting(self, pattern_key: str, key: str, module: str) -> float:
        """A number from the first pattern that fits the end of the module's name, or the default.

        The patterns are regular expressions, as in PEFT.
        """
        patterns = self.config.get(pattern_key) or {}
        value = self.config.get(key, 8)
        try:
            for pattern, special in patterns.items():
                if re.match(rf"(.*\.)?({pattern})$", module):
                    value = special
                    break
        except (re.error, AttributeError) as error:
            raise CheckpointError(
                f"{self.label}: {pattern_key} in {ADAPTER_CONFIG} is not a map of patterns"
            ) from error
        # PEFT takes an alpha of 0, whose update is nothing, and negative ones. NaN is in no interval,
        # and a number too large for float32 scales to infinity.
        least = 0.0 if key == "r" else -_LARGEST
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not least < value < _LARGEST
        ):
            what = "a positive whole number" if key == "r" else "a number that float32 can hold"
            raise CheckpointError(
                f"{self.label}: {key} in {ADAPTER_CONFIG} is {value!r:.80} for {module}",
                f"It must be {what}: correct {key} or {pattern_key} there.",
            )
        return value


def open_adapter(path: Path, *, label: str | None = None) -> Adapter:
    """Open a LoRA adapter's folder: `adapter_config.json` and its weights, in one file or in shards.

    Args:
        path: The folder.
        label: What errors call it; the path by default.

    Raises:
        CheckpointError: if it is no adapter, damaged, or of a kind that Isthmus cannot apply.
    """
    return Adapter(path, label or str(path))


_CURE = "Apply it to its base model with PEFT's merge_and_unload, and merge the result."


def _check_supported(config: Mapping[str, Any], label: str) -> None:
    kind = config.get("peft_type")
    if kind is None:
        raise CheckpointError(
            f"{label}: {ADAPTER_CONFIG} does not say what kind of adapter it is (peft_type)",
            'Download it again; or if it is plain LoRA, add `"peft_type": "LORA"` there.',
        )
    if kind != "LORA":
        raise CheckpointError(f"{label} is an adapter of the kind {kind}, not LoRA", _CURE)
    for key, name in _UNSUPPORTED.items():
        if config.get(key):
            raise CheckpointError(f"{label} uses {name}, which Isthmus does not apply yet", _CURE)
    whole = config.get("modules_to_save")
    if whole is not None and not (
        isinstance(whole, list) and all(isinstance(name, str) for name in whole)
    ):
        raise CheckpointError(
            f"{label}: modules_to_save in {ADAPTER_CONFIG} is {whole!r:.80}",
            "It must be a list of names, or null.",
        )
    beginning = config.get("init_lora_weights")
    if beginning not in _HARMLESS_BEGINNINGS:
        raise CheckpointError(
            f"{label} began with init_lora_weights={beginning!r}, which changes the base model too",
            _CURE,
        )
