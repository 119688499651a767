"""Fine-tunes of one pretrained network at a noise scale, merged by three methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.lab.data.named import Data
from isthmus.lab.networks.state import seeded, state
from isthmus.lab.noise.data import noise_data
from isthmus.lab.noise.networks import made_network
from isthmus.lab.noise.settings import TrainingSettings, TransferSettings
from isthmus.lab.noise.training import train
from isthmus.lab.noise.transfer_merges import State, merge_figures
from isthmus.lab.paths.training import kept

_BATCH = 1000


def run_transfer(
    settings: TransferSettings, folder: Path, tell: Callable[[float], None], *, cache: Path
) -> Mapping[str, Any]:
    """Fine-tune a pretrained network twice, and merge both.

    Args:
        settings: Of the fine-tunes.
        folder: For checkpoints.
        tell: Told the share that is done.
        cache: Where data lie; the pretrained network is kept there.

    Returns:
        ``noise_scale``; ``accuracy``, of the experts on their own tasks, and ``base_accuracy``, of the pretrained
        network; by method ``METHOD_accuracy`` and ``METHOD_gain`` over the experts' mean, over all tasks, and
        ``METHOD_setting``, as validation chose it; ``distance`` of the experts, relative to the norm of one,
        and ``cosine`` of their task vectors.

    Raises:
        Diverged: A fine-tune did.
        IsthmusError: Data are missing.
    """
    data = noise_data(settings.model_copy(update={"examples": _pool(settings)}), cache)
    validation, data = _held_out(data, settings)
    network = made_network(settings, data)
    base = _pretrained(settings, cache)
    experts: list[State] = []
    tasks = _tasks(settings, data.classes)
    for number, classes in enumerate(tasks):
        network.load_state_dict(base)
        train(
            network,
            _of_classes(data, classes),
            settings,
            epochs=(0, settings.epochs),
            order=(settings.seed, number + 1),
            checkpoint=folder / f"expert-{number}.pt",
            tell=partial(_told, tell, number),
        )
        experts.append(state(network))
    bench = _Bench(network, tasks)
    parents = [
        bench.task(expert, data.test_inputs, data.test_targets, classes)
        for expert, classes in zip(experts, tasks, strict=True)
    ]
    accuracy = fmean(parents)
    return {
        "noise_scale": settings.noise_scale,
        "accuracy": accuracy,
        "base_accuracy": bench.accuracy(base, data.test_inputs, data.test_targets),
        **merge_figures(
            base,
            experts,
            accuracy,
            validate=lambda merged: bench.accuracy(merged, validation.inputs, validation.targets),
            test=lambda merged: bench.accuracy(merged, data.test_inputs, data.test_targets),
        ),
    }


def _told(tell: Callable[[float], None], number: int, share: float) -> None:
    tell((number + share) / 2)


@dataclass(frozen=True)
class _Bench:
    """Judges a network task by task, among the classes of the task alone."""

    network: nn.Module
    tasks: Sequence[Sequence[int]]

    def accuracy(self, tensors: State, inputs: Tensor, targets: Tensor) -> float:
        return fmean(self.task(tensors, inputs, targets, each) for each in self.tasks)

    def task(
        self, tensors: State, inputs: Tensor, targets: Tensor, classes: Sequence[int]
    ) -> float:
        self.network.load_state_dict(dict(tensors))
        own = torch.isin(targets, torch.tensor(classes))
        inputs, targets = inputs[own], targets[own]
        right = 0
        with torch.no_grad():
            for x, y in zip(torch.split(inputs, _BATCH), torch.split(targets, _BATCH), strict=True):
                logits = self.network(x)
                others = torch.ones(logits.shape[-1], dtype=torch.bool)
                others[list(classes)] = False
                right += int((logits.masked_fill(others, -math.inf).argmax(-1) == y).sum())
        return right / len(targets)


def _pretrained(settings: TransferSettings, cache: Path) -> dict[str, Tensor]:
    source = TrainingSettings(
        **settings.model_dump(include=set(TrainingSettings.model_fields))
        | {
            "data": settings.source,
            "examples": settings.source_examples,
            "optimizer": "adamw",
            "lr": settings.source_lr,
            "batch": 64,
            "momentum": 0.0,
            "weight_decay": 0.01,
            "augment": 0,
            "schedule": "cosine",
            "epochs": settings.source_epochs,
        }
    )

    def pretrain() -> nn.Module:
        data = noise_data(source, cache)
        seeded(settings.seed)
        network = made_network(source, data)
        train(network, data, source, epochs=(0, source.epochs), order=(settings.seed, 0))
        return network

    record = source.model_dump(mode="json") | {"seed": settings.seed}
    place = cache / "lab-noise" / f"{source.architecture}-{source.data}-seed-{settings.seed}"
    return kept(place, record, pretrain)


def _pool(settings: TransferSettings) -> int:
    return settings.examples + settings.validation


def _held_out(data: Data, settings: TransferSettings) -> tuple[Data, Data]:
    """Validation examples, and the data without them."""
    cut = settings.validation
    validation = replace(data, inputs=data.inputs[:cut], targets=data.targets[:cut])
    return validation, replace(data, inputs=data.inputs[cut:], targets=data.targets[cut:])


def _tasks(settings: TransferSettings, classes: int) -> list[list[int]]:
    if settings.tasks == "same":
        return [list(range(classes))] * 2
    return [list(range(classes // 2)), list(range(classes // 2, classes))]


def _of_classes(data: Data, classes: Sequence[int]) -> Data:
    own = torch.isin(data.targets, torch.tensor(classes))
    return replace(data, inputs=data.inputs[own], targets=data.targets[own])
