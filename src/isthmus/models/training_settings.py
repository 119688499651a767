"""Reading how a model was trained: learning rate, batch size, momentum, decay."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from isthmus.errors import TrainingError
from isthmus.optim.noise_scale import adaptive_noise_scale, effective_noise_scale

_NAMES = {
    "lr": ("max_lr", "peak_lr", "learning_rate", "lr"),
    "weight_decay": ("weight_decay",),
    "momentum": ("momentum", "sgd_momentum"),
    "beta1": ("adam_beta1", "beta1"),
    "beta2": ("adam_beta2", "beta2"),
    "devices": ("world_size", "num_devices", "num_processes"),
}
"""What settings are called: transformers' names first, but the peak of a schedule before where it starts."""

_PER_DEVICE = ("per_device_train_batch_size", "micro_batch_size", "train_batch_size")

_MODEL = ("model_name_or_path", "base_model", "model_name", "model")

_ADAPTER = ("adapter", "use_peft", "use_lora", "lora_r", "lora_rank", "peft_config", "lora_config")

_FOLDER = ("training_args.json", "training_args.yaml", "training_args.yml", "trainer_state.json")

_CONVERT = (
    "it is a pickle, which may run any code when opened: where you trust it, write "
    "`args.to_json_string()` into training_args.json beside it"
)


@dataclass(frozen=True)
class BatchParts:
    """What a batch is the product of; None where the file does not say, which counts as 1.

    Attributes:
        per_device: Examples of a micro-batch.
        accumulation: Micro-batches of a step.
        devices: That train at once.
    """

    per_device: int
    accumulation: int | None = None
    devices: int | None = None


@dataclass(frozen=True)
class TrainingSettings:
    """What is known of a training; None where the file does not say.

    Attributes:
        lr: The largest learning rate, η.
        batch_size: Examples of one step, over all devices and accumulated micro-batches.
        momentum: μ of gradient descent.
        betas: Of Adam and its kin.
        weight_decay: λ.
        optimizer: Its name, as the file has it.
        final_lr: The last learning rate that was logged.
        steps: Steps that were made, or planned.
        parts: Of the batch; None where the file gives the whole.
        model: The name of what is trained.
        adapter: Whether only an adapter such as LoRA is trained, as far as the file says.
        source: The files.
    """

    lr: float | None = None
    batch_size: int | None = None
    momentum: float | None = None
    betas: tuple[float, float] | None = None
    weight_decay: float | None = None
    optimizer: str | None = None
    final_lr: float | None = None
    steps: int | None = None
    parts: BatchParts | None = None
    model: str | None = None
    adapter: bool | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for name, value, most in (
            ("the learning rate", self.lr, math.inf),
            ("the batch size", self.batch_size, math.inf),
            ("momentum", self.momentum, 1.0),
            ("β₁", self.betas and self.betas[0], 1.0),
            ("β₂", self.betas and self.betas[1], 1.0),
            ("weight decay", self.weight_decay, math.inf),
        ):
            least = 1 if name == "the batch size" else 0
            if value is not None and not least <= value < most:
                raise TrainingError(
                    f"{self.source}: {name} is {value}",
                    f"it must be {least} or more"
                    + (f", and less than {most:g}" if most < math.inf else ", and finite"),
                )

    @property
    def adaptive(self) -> bool:
        """Whether steps do not grow with the gradient: every optimizer but SGD."""
        words = self.optimizer_parts
        return self.optimizer is not None and ("sgd" not in words or "sign" in words)

    @property
    def optimizer_parts(self) -> frozenset[str]:
        """The words of the optimizer's name: of `paged_adamw_8bit` it is adamw that counts."""
        return frozenset(re.findall("[a-z]+", (self.optimizer or "").lower()))

    def noise_scale(self) -> float:
        """`effective_noise_scale`, or `adaptive_noise_scale` for an adaptive optimizer.

        Raises:
            TrainingError: the learning rate, the batch size or the optimizer is not known.
        """
        if self.lr is None or self.batch_size is None or self.optimizer is None:
            missing, key = next(
                (name, key)
                for name, key, value in (
                    ("learning rate", "learning_rate", self.lr),
                    ("batch size", "batch_size", self.batch_size),
                    ("optimizer", "optim", self.optimizer),
                )
                if value is None
            )
            raise TrainingError(
                f"{self.source} does not tell the {missing}",
                f"write `{key}: ...` into training_args.yaml beside it, and name the folder"
                if self.source.endswith("trainer_state.json")
                else f"write `{key}: ...` into it",
            )
        if self.adaptive:
            return adaptive_noise_scale(self.lr, self.batch_size)
        return effective_noise_scale(self.lr, self.batch_size, self.momentum or 0.0)


def read_training_settings(
    path: Path, *, devices: int | None = None, accumulation: int | None = None
) -> TrainingSettings:
    """Read a `trainer_state.json`, training arguments as JSON or YAML, or a folder with them.

    Names are transformers' (learning_rate, per_device_train_batch_size, gradient_accumulation_steps, optim,
    adam_beta1 and so on) or plain (lr, batch_size, momentum, betas, optimizer, weight_decay).

    Args:
        path: Where a folder has arguments and state, the arguments come first, and the state adds the
            learning rates that were logged.
        devices: How many trained at once, where the files do not say; 1 if None.
        accumulation: Micro-batches of a step, likewise. A trainer_state.json never says either.

    Raises:
        TrainingError: nothing there, a training_args.bin alone, a file that cannot be parsed, a setting that
            is no number or out of range.
    """
    for name, count in (("devices", devices), ("accumulation", accumulation)):
        if count is not None and count < 1:
            raise TrainingError(f"{name} is {count}", "it must be at least 1")
    if not path.is_dir():
        return _settings(path, devices, accumulation)
    files = [path / name for name in _FOLDER if (path / name).is_file()]
    if not files:
        pickled = path / "training_args.bin"
        raise TrainingError(
            f"{path} holds no training settings that can be read",
            f"{pickled.name} is there, but {_CONVERT}"
            if pickled.is_file()
            else f"known are {', '.join(_FOLDER)}",
        )
    found = [_settings(file, devices, accumulation) for file in files]
    merged = found[0]
    for other in found[1:]:
        unknown = {
            name: value for name, value in vars(other).items() if getattr(merged, name) is None
        }
        if merged.batch_size is not None:
            unknown.pop("parts", None)
        merged = replace(merged, **unknown, source=f"{merged.source} and {other.source}")
    return merged


def _settings(path: Path, devices: int | None, accumulation: int | None) -> TrainingSettings:
    label = str(path)
    content = _flat(_read(path))
    numbers = {name: _number(content, names, label) for name, names in _NAMES.items()}
    betas = _betas(content, numbers["beta1"], numbers["beta2"], label)
    optimizer = content.get("optim", content.get("optimizer"))
    model = next((content[name] for name in _MODEL if isinstance(content.get(name), str)), None)
    momentum = numbers["momentum"]
    given = re.search(r"(?:^|,)\s*momentum=([\d.eE+-]+)", str(content.get("optim_args") or ""))
    if momentum is None and given:
        momentum = _number({"momentum": given[1]}, ("momentum",), label)
    logged = [
        rate
        for entry in content.get("log_history") or []
        if isinstance(entry, dict)
        and (rate := _number(entry, ("learning_rate",), label)) is not None
    ]
    peak = numbers["lr"] if numbers["lr"] is not None else max(logged, default=None)
    steps = _number(content, ("global_step", "max_steps"), label)
    batch, parts = _batch(content, numbers["devices"], devices, accumulation, label)
    return TrainingSettings(
        lr=peak,
        batch_size=batch,
        momentum=momentum,
        betas=betas,
        weight_decay=numbers["weight_decay"],
        optimizer=None if optimizer is None else str(optimizer),
        final_lr=logged[-1] if logged else None,
        steps=int(steps) if steps is not None and steps > 0 else None,
        parts=parts,
        model=model,
        adapter=True if any(content.get(name) for name in _ADAPTER) else None,
        source=label,
    )


def _flat(content: dict[str, Any]) -> dict[str, Any]:
    """The settings of an optimizer that stand below its name, beside the others."""
    below = content.get("optimizer")
    if not isinstance(below, dict):
        return content
    name = next((below[key] for key in ("name", "type", "_target_") if key in below), None)
    return {**below, **content, "optimizer": name}


def _batch(
    content: Mapping[str, Any],
    devices: float | None,
    given_devices: int | None,
    given_accumulation: int | None,
    label: str,
) -> tuple[int | None, BatchParts | None]:
    whole = _number(content, ("batch_size", "global_batch_size"), label)
    if whole is not None:
        return _whole(whole, "the batch size", label), None
    part = _number(content, _PER_DEVICE, label)
    if part is None:
        return None, None
    accumulated = _number(content, ("gradient_accumulation_steps",), label)
    counts = [
        None if count is None else _whole(count, name, label)
        for name, count in (
            (
                "gradient_accumulation_steps",
                given_accumulation if accumulated is None else accumulated,
            ),
            ("the number of devices", given_devices if devices is None else devices),
        )
    ]
    parts = BatchParts(_whole(part, "the batch size", label), *counts)
    return parts.per_device * (parts.accumulation or 1) * (parts.devices or 1), parts


def _whole(number: float, name: str, label: str) -> int:
    if not 1 <= number < math.inf or number != int(number):
        raise TrainingError(
            f"{label}: {name} is {number:g}", "it must be a whole number, 1 or more"
        )
    return int(number)


def _betas(
    content: Mapping[str, Any], first: float | None, second: float | None, label: str
) -> tuple[float, float] | None:
    given = content.get("betas")
    if isinstance(given, list) and len(given) == 2:
        first, second = (_number({"betas": one}, ("betas",), label) for one in given)
    return None if first is None or second is None else (first, second)


def _number(content: Mapping[str, Any], names: tuple[str, ...], label: str) -> float | None:
    for name in names:
        value = content.get(name)
        if value is None:
            continue
        try:
            # YAML takes 1e-5 for text.
            return float(value)
        except (TypeError, ValueError) as error:
            raise TrainingError(
                f"{label}: {name} is {value!r}, which is no number",
                "write a number, such as 32, 0.001 or 1e-3",
            ) from error
    return None


def _read(path: Path) -> dict[str, Any]:
    if path.suffix in (".bin", ".pt", ".pth", ".pkl"):
        raise TrainingError(f"{path} is not opened", _CONVERT)
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise TrainingError(
            f"{path} cannot be read: {reason}", "name a JSON or YAML file, or a folder with one"
        ) from error
    if not isinstance(content, dict):
        raise TrainingError(
            f"{path} holds no settings by name", "write lines such as learning_rate: 0.001"
        )
    return content
