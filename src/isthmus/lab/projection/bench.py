"""Judging merged models: accuracy on the tasks, and distance from the experts' layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from isthmus.checkpoints import Checkpoint, open_checkpoint
from isthmus.lab.bench import Bench, Part
from isthmus.lab.cache import file_hash
from isthmus.lab.evaluate import Accuracies
from isthmus.models.layers import Layer, linear_layers
from isthmus.models.store import StoredMoments
from isthmus.projection.objective import LayerObjective, expert_objective

WEIGHTS = "model.safetensors"


class ModelBench(Bench):
    """Judges full models under fixed heads."""

    def accuracy(
        self, folder: Path | None, part: Part, *, tasks: tuple[str, ...] | None = None
    ) -> Accuracies:
        """Accuracy of a model.

        Args:
            folder: Where it is; None for the base.
            part: Choose on validation, report on test.
            tasks: Which tasks; all by default.
        """
        return self.judged(
            {"model": None if folder is None else file_hash(folder / WEIGHTS)},
            lambda: self._base if folder is None else self._base.reopened(folder),
            part,
            tasks,
        )


@dataclass(frozen=True)
class Energies:
    """How much of the base's error a model removes, layer by layer, on the experts' inputs.

    Attributes:
        captured: Over all layers: 1 - Σ J / Σ J(0).
        by_layer: By name of the layer's weight: 1 - J / J(0).
    """

    captured: float
    by_layer: dict[str, float]


class FixedObjective:
    """The layer-local objective of all layers, the same for every merge, whatever made it.

    A layer's inputs are those that it has in the experts. Every task counts alike, as in a merge.

    Args:
        base: The base model.
        experts: Folder by task.
        moments: Of the experts' inputs, by task.
    """

    def __init__(
        self, base: Path, experts: Mapping[str, Path], moments: Mapping[str, StoredMoments]
    ) -> None:
        self._base = base
        self._objectives: dict[Layer, LayerObjective] = {}
        with open_checkpoint(str(base)) as start:
            layers = linear_layers(start)
            weights = {layer: _matrix(start, layer) for layer in layers}
        targets: dict[Layer, list[Tensor]] = {layer: [] for layer in layers}
        for folder in experts.values():
            with open_checkpoint(str(folder)) as expert:
                for layer in layers:
                    targets[layer].append(_matrix(expert, layer) - weights[layer])
        for layer in layers:
            # A pooler that no example reaches has none.
            own = [moments[task][layer.weight] for task in experts if layer.weight in moments[task]]
            if len(own) < len(experts):
                continue
            tau = torch.stack(targets[layer])
            sized = [one if layer.bias else one.without_constant() for one in own]
            shares = [1 / one.count for one in sized]
            self._objectives[layer] = expert_objective(tau, sized, shares)
        self._weights = weights

    def of(self, folder: Path) -> Energies:
        """The energies that a model captures."""
        initial = value = 0.0
        by_layer: dict[str, float] = {}
        with open_checkpoint(str(folder)) as model:
            for layer, objective in self._objectives.items():
                found = max(objective.value(_matrix(model, layer) - self._weights[layer]), 0.0)
                initial += objective.initial
                value += found
                if objective.initial > 0:
                    by_layer[layer.weight] = 1 - found / objective.initial
        return Energies(1 - value / initial if initial > 0 else 1.0, by_layer)


def _matrix(model: Checkpoint, layer: Layer) -> Tensor:
    """Weight and bias as one matrix, [m, n + 1] in float64."""
    weight = _read(model, layer.weight)
    matrix = weight.mT if layer.transposed else weight
    if layer.bias is None:
        return matrix
    return torch.cat([matrix, _read(model, layer.bias).unsqueeze(1)], dim=1)


def _read(model: Checkpoint, name: str) -> Tensor:
    info = model.tensors[name]
    out = np.empty(info.numel, np.float64)
    model.read(name, 0, out)
    return torch.from_numpy(out).view(info.shape)
