"""Training two-layer networks to interpolation: where they end, in which ball, connected to what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from isthmus.errors import TwoLayerError
from isthmus.two_layer.connecting import Connection, connect
from isthmus.two_layer.network import Ball, Data, Network, norm
from isthmus.two_layer.patterns import Patterns, patterns
from isthmus.two_layer.split import Kind, component_of

Factory: TypeAlias = Callable[[list[Tensor], float], Optimizer]
"""From the parameters and the learning rate an optimizer with its weight decay set."""


@dataclass(frozen=True)
class Training:
    """An optimizer, the ball that its weight decay keeps it in, and a schedule.

    Attributes:
        name: For tables.
        ball: Dual to the optimizer's norm.
        weight_decay: λ; the ball has the radius 1/λ.
        factory: Makes the optimizer, with this λ.
        lr: η of the first half; falls geometrically to `last_lr` in the second, since at a fixed η such
            optimizers circle around their limit at a distance of order η. The boundary is approached like
            e^{−λΣη}, so λ·η·steps/2 should be 10 or more.
        last_lr: η at last.
        steps: Full-batch steps.
    """

    name: str
    ball: Ball
    weight_decay: float
    factory: Factory
    lr: float = 0.03
    last_lr: float = 1e-6
    steps: int = 3000

    @property
    def radius(self) -> float:
        """1/λ."""
        return 1 / self.weight_decay


@dataclass(frozen=True, eq=False)
class Trained:
    """Where a training ended.

    Attributes:
        seed: Of its start.
        network: In float64.
        loss: ½Σ(f − y)².
        saturation: λ times the norm of the training's ball; 1 is the boundary.
    """

    seed: int
    network: Network
    loss: float
    saturation: float


def drawn(width: int, dimension: int, seed: int, scale: float = 0.5) -> Network:
    """A start with normal weights.

    Args:
        width: m.
        dimension: d.
        seed: Same seed, same network.
        scale: Standard deviation of all weights.
    """
    random = np.random.default_rng(seed)
    return Network(
        scale * random.normal(size=width), scale * random.normal(size=(width, dimension))
    )


def train(
    starts: Sequence[Network], data: Data, training: Training, seeds: Sequence[int] | None = None
) -> tuple[Trained, ...]:
    """Train networks side by side, each for itself, by full batches in float64.

    Args:
        starts: Where to start; of one width.
        data: The data.
        training: Optimizer and schedule. Each network's a, shape [1, m], and W, shape [m, d], are parameters of
            their own: a matrix of one row, so that Muon's norm is defined for it.
        seeds: For the record: those that the starts were drawn with; their positions by default.

    Raises:
        TwoLayerError: a training diverged, settings are out of range, or the starts' shapes differ.
    """
    if not (
        0 < training.last_lr <= training.lr and training.steps > 0 and training.weight_decay > 0
    ):
        raise TwoLayerError(
            f"the training {training.name} has the learning rates {training.lr} to {training.last_lr}, "
            f"{training.steps} steps and the weight decay {training.weight_decay}",
            "take positive settings, the last learning rate no larger than the first",
        )
    if len({start.inner.shape for start in starts}) != 1:
        raise TwoLayerError("there are no starts, or of several widths", "give those of one width")
    outer = torch.tensor(np.stack([start.outer[None] for start in starts]))
    inner = torch.tensor(np.stack([start.inner for start in starts]))
    points, labels = torch.tensor(data.points), torch.tensor(data.labels)
    # Parameters are views: the forward pass sees all networks at once, the optimizer each alone.
    parameters = [view for both in zip(outer, inner, strict=True) for view in both]
    optimizer = training.factory(parameters, training.lr)
    half = training.steps // 2
    decay = (training.last_lr / training.lr) ** (1 / max(1, training.steps - half - 1))
    for step in range(training.steps):
        for group in optimizer.param_groups:
            group["lr"] = training.lr * decay ** max(0, step - half)
        sides = inner @ points.T
        hidden = sides.clamp(min=0)
        residual = outer @ hidden - labels
        outer_slope = residual @ hidden.mT
        inner_slope = (outer.mT * residual * (sides > 0)) @ points
        slopes = (slope for both in zip(outer_slope, inner_slope, strict=True) for slope in both)
        for parameter, slope in zip(parameters, slopes, strict=True):
            parameter.grad = slope
        optimizer.step()
    if not (outer.isfinite().all() and inner.isfinite().all()):
        raise TwoLayerError(
            f"the training {training.name} diverged to NaN or infinity", "lower its learning rate"
        )
    ends = [Network(a[0], w) for a, w in zip(outer.numpy(), inner.numpy(), strict=True)]
    named = range(len(ends)) if seeds is None else seeds
    return tuple(
        Trained(seed, end, end.loss(data), training.weight_decay * norm(end, training.ball))
        for seed, end in zip(named, ends, strict=True)
    )


def train_many(
    width: int, data: Data, training: Training, seeds: Sequence[int], scale: float = 0.5
) -> tuple[Trained, ...]:
    """One training a seed.

    Args:
        width: m.
        data: The data.
        training: Optimizer and schedule.
        seeds: Of the starts.
        scale: See `drawn`.

    Raises:
        TwoLayerError: as `train` does.
    """
    dimension = data.points.shape[1]
    return train([drawn(width, dimension, seed, scale) for seed in seeds], data, training, seeds)


@dataclass(frozen=True, eq=False)
class Pairs:
    """All pairs of the trainings that interpolate, and what the construction says of each.

    Attributes:
        width: m.
        trained: How many trainings there were.
        fitted: How many of them interpolate.
        connections: One a pair.
        radius: Of the ball of each pair: the training's, or the larger norm of the two ends where one is
            outside by what its last steps left.
    """

    width: int
    trained: int
    fitted: int
    connections: tuple[Connection, ...]
    radius: tuple[float, ...]

    @property
    def fraction(self) -> float | None:
        """The share of pairs that are connected; None without pairs."""
        if not self.connections:
            return None
        return sum(one.path is not None for one in self.connections) / len(self.connections)


def connect_pairs(
    ends: Sequence[Trained],
    data: Data,
    training: Training,
    tolerance: float = 1e-6,
    found: Patterns | None = None,
) -> Pairs:
    """Try to connect every pair of the trainings that interpolate.

    Args:
        ends: Of one width.
        data: The data.
        training: Theirs.
        tolerance: A training interpolates if its loss is no more.
        found: The patterns of the data, if they are known.

    Raises:
        TwoLayerError: no trainings, or of several widths.
    """
    if len({one.network.width for one in ends}) != 1:
        raise TwoLayerError(
            "there are no trainings, or of several widths", "give those of one width"
        )
    known = patterns(data.points) if found is None else found
    fitted = [one.network for one in ends if one.loss <= tolerance]
    pairs = list(combinations(fitted, 2))
    radius = tuple(
        max(training.radius, *(norm(one, training.ball) for one in pair)) for pair in pairs
    )
    connections = tuple(
        connect(*pair, data, training.ball, size, found=known)
        for pair, size in zip(pairs, radius, strict=True)
    )
    return Pairs(ends[0].network.width, len(ends), len(fitted), connections, radius)


def kinds(
    ends: Sequence[Trained], data: Data, tolerance: float = 1e-3
) -> dict[Kind | None, tuple[int, ...]]:
    """Which component of the two-neuron data each training ended in.

    Args:
        ends: Of two neurons.
        data: Of `two_neuron_data`.
        tolerance: A training of a larger loss counts under None; at most ½.

    Returns:
        By kind the seeds; under None those that did not interpolate.

    Raises:
        TwoLayerError: other data or widths.
    """
    found: dict[Kind | None, list[int]] = {"same": [], "opposite": [], None: []}
    for one in ends:
        component = component_of(one.network, data, tolerance)
        found[component.kind if component else None].append(one.seed)
    return {kind: tuple(seeds) for kind, seeds in found.items()}
