"""Opening LoRA adapters in PEFT's layout: factors and scales, without their products."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.checkpoints.base import SourceFile, TensorInfo
from isthmus.checkpoints.index import inside, read_json
from isthmus.checkpoints.safetensors_file import SafetensorsFile
from isthmus.checkpoints.tensor_file import TensorFile
from isthmus.checkpoints.torch_file import TorchFile
from isthmus.errors import CheckpointError
from isthmus.typing import FloatArray

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

# PEFT wraps the model twice, and its names say so.
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<factor>[AB])(\.weight)?")

# Settings that change what the factors mean, and what people call them.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "lora_bias": "LoRA with biases of its own (lora_bias)",
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
        a: The stored A, of shape [rank, inputs].
        b: The stored B, of shape [outputs, rank].
        scaling: The factor before the product.
        embedding: Whether the module is an embedding; then A's columns are the tokens.
        fan_in_fan_out: Whether the base's weight is said to be of shape [inputs, outputs].
    """

    module: str
    a: TensorInfo
    b: TensorInfo
    scaling: float
    embedding: bool
    fan_in_fan_out: bool

    @property
    def rank(self) -> int:
        """The rank of the factors."""
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of `B @ A`: outputs and inputs."""
        return self.b.shape[0], self.a.shape[1]


class Adapter:
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
        self._file = _open_weights(path)
        self.sources = (SourceFile.of(config_path, config_path.stat()), self._file.source)
        factors: dict[tuple[str, bool], dict[str, TensorInfo]] = {}
        self.replaced: dict[str, TensorInfo] = {}
        for stored, info in self._file.tensors.items():
            name = stored.removeprefix(_PREFIX)
            match = _FACTOR.fullmatch(name)
            if match:
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
            module: self._update(module, embedding, pair)
            for (module, embedding), pair in factors.items()
        }

    def read(self, info: TensorInfo, start: int, out: FloatArray) -> None:
        """Decode elements `start : start + out.size` of one of the stored tensors into `out`.

        Raises:
            CheckpointError: if the file was changed or cut since it was opened.
        """
        self._file.read(info.name, start, out)

    def factor(self, info: TensorInfo, dtype: np.dtype[Any]) -> FloatArray:
        """All of an A or B, in float32 or float64.

        Raises:
            CheckpointError: if the file was changed or cut since it was opened.
        """
        values = np.empty(info.numel, dtype)
        self._file.read(info.name, 0, values)
        return values.reshape(info.shape)

    def close(self) -> None:
        """Release the file. Closing twice is allowed."""
        self._file.close()

    def _update(
        self, module: str, embedding: bool, factors: Mapping[str, TensorInfo]
    ) -> LowRankUpdate:
        if factors.keys() != {"A", "B"}:
            raise CheckpointError(
                f"{self.label} holds lora_{min(factors)} of {module} without its other half",
                "The adapter is damaged; download it again.",
            )
        a, b = factors["A"], factors["B"]
        if len(a.shape) != 2 or len(b.shape) != 2:
            raise CheckpointError(
                f"{self.label} adapts {module} by factors of shapes {list(a.shape)} and "
                f"{list(b.shape)}: LoRA on convolutions",
                _CURE,
            )
        rank = self._setting("rank_pattern", "r", module)
        if not a.dtype.is_float or a.shape[0] != b.shape[1] or a.shape[0] != rank:
            raise CheckpointError(
                f"{self.label}: the factors of {module} have shapes {list(a.shape)} and "
                f"{list(b.shape)}, but {ADAPTER_CONFIG} says that their rank is {rank}",
                "Weights and configuration belong to different adapters.",
            )
        alpha = self._setting("alpha_pattern", "lora_alpha", module)
        divisor = math.sqrt(rank) if self.config.get("use_rslora") else rank
        return LowRankUpdate(
            module, a, b, alpha / divisor, embedding, bool(self.config.get("fan_in_fan_out"))
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
        # NaN is in no interval, and a number too large for float32 scales to infinity.
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not 0 < value < _LARGEST
        ):
            raise CheckpointError(
                f"{self.label}: {key} in {ADAPTER_CONFIG} is {value!r:.80} for {module}",
                "It must be a positive number. Download the adapter again.",
            )
        return value


def open_adapter(path: Path, *, label: str | None = None) -> Adapter:
    """Open a LoRA adapter's folder: `adapter_config.json` and `adapter_model.safetensors` or `.bin`.

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
    if kind != "LORA":
        raise CheckpointError(f"{label} is an adapter of the kind {kind}, not LoRA", _CURE)
    for key, name in _UNSUPPORTED.items():
        if config.get(key):
            raise CheckpointError(f"{label} uses {name}, which Isthmus does not apply yet", _CURE)
    beginning = config.get("init_lora_weights")
    if beginning not in _HARMLESS_BEGINNINGS:
        raise CheckpointError(
            f"{label} began with init_lora_weights={beginning!r}, which changes the base model too",
            _CURE,
        )


def _open_weights(folder: Path) -> TensorFile:
    safetensors, torch = (inside(folder, name) for name in ADAPTER_WEIGHTS)
    if safetensors.exists():
        return SafetensorsFile(safetensors)
    if torch.exists():
        return TorchFile(torch)
    raise CheckpointError(
        f"{folder} holds {ADAPTER_CONFIG} but neither {' nor '.join(ADAPTER_WEIGHTS)}",
        "Download the adapter again.",
    )
