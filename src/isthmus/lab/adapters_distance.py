"""How much the adapters of several tasks have in common, before any of them is merged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import exp
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from isthmus.checkpoints import open_adapter
from isthmus.geometry.factored import Factored


@dataclass(frozen=True)
class Likeness:
    """Means over the modules, and over the pairs of adapters where two are compared.

    Attributes:
        effective_rank: exp of the entropy of the squared singular values' shares, of each update.
        overlap: ‖U₁ᵀU₂‖²/r of the updates' left singular vectors: 1 for the same column space,
            0 for orthogonal ones, r/m for random ones.
        cosine: Of the updates as vectors.
    """

    effective_rank: float
    overlap: float
    cosine: float


def likeness(adapters: Sequence[Path]) -> Likeness:
    """Compare adapters that change the same modules.

    Args:
        adapters: Their folders, two at least.

    Raises:
        CheckpointError: One of them cannot be opened.
    """
    ranks: list[float] = []
    overlaps: list[float] = []
    cosines: list[float] = []
    for same in zip(*map(_updates, adapters), strict=True):
        for update in same:
            values = torch.linalg.svdvals(update.recompressed(update.rank)[0].left) ** 4
            shares = values[values > 0] / values.sum()
            ranks.append(exp(-float((shares * shares.log()).sum())))
        for one, other in combinations(same, 2):
            bases = torch.linalg.qr(one.left).Q.mT @ torch.linalg.qr(other.left).Q
            overlaps.append(float((bases**2).sum()) / min(one.rank, other.rank))
            lengths = (_inner(one, one) * _inner(other, other)).sqrt()
            cosines.append(float(_inner(one, other) / lengths))
    return Likeness(fmean(ranks), fmean(overlaps), fmean(cosines))


def _updates(folder: Path) -> list[Factored]:
    """The updates of an adapter, by module name."""
    adapter = open_adapter(folder)
    double = np.dtype(np.float64)
    try:
        return [
            Factored(
                torch.from_numpy(update.scaling * adapter.factor(update.b, double)),
                torch.from_numpy(adapter.factor(update.a, double)),
            )
            for _, update in sorted(adapter.updates.items())
        ]
    finally:
        adapter.close()


def _inner(one: Factored, other: Factored) -> Tensor:
    """tr(X₁ᵀX₂) of two products, without forming them."""
    return ((one.left.mT @ other.left) * (one.right @ other.right.mT)).sum()
