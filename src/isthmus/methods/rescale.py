"""Making up for the entries that a sparsifier dropped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from array_api_compat import array_namespace

from isthmus.methods.deltas import DeltaChunk, Deltas
from isthmus.methods.sparsify import Sparsify
from isthmus.typing import Array

NEGLIGIBLE = 1e-7
"""An ℓ1 norm below this is not used as a divisor; mergekit draws the same line."""


def l1_factors(deltas: Deltas, sparsify: Sparsify, experts: int) -> list[float]:
    """‖τ‖₁ / ‖sparse τ‖₁ for each expert, accumulated in float64 (mergekit's `rescale`)."""
    before, after = np.zeros(experts), np.zeros(experts)
    for chunk in deltas:
        before += _absolute_sums(chunk.rows)
        after += _absolute_sums(sparsify(chunk))
    return [
        1.0 if min(whole, kept) < NEGLIGIBLE else whole / kept
        for whole, kept in zip(before.tolist(), after.tolist(), strict=True)
    ]


def _absolute_sums(rows: Array) -> list[float]:
    xp = array_namespace(rows)
    return [float(xp.sum(xp.abs(rows[row, ...]), dtype=xp.float64)) for row in range(rows.shape[0])]


def rescaled(sparsify: Sparsify, factors: Sequence[float]) -> Sparsify:
    """The sparse task vectors, each times its factor."""

    def apply(chunk: DeltaChunk) -> Array:
        rows = sparsify(chunk)
        for row, factor in enumerate(factors):
            delta = rows[row, ...]
            delta *= factor
        return rows

    return apply
