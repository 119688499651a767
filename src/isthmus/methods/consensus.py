"""Consensus: which experts agree with the elected sign of an entry."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from array_api_compat import array_namespace, is_numpy_array

from isthmus.typing import Array


def merge_agreeing(rows: Array, weights: Sequence[float], *, mean: bool) -> Array:
    """Elect a sign for every entry and merge the experts that have it.

    The elected sign is that of sum_k w_k τ_k, plus where the sum is zero (Yadav et al. 2023,
    section 4.2); experts whose weighted entry has the other sign, or is zero, are left out.

    Args:
        rows: Sparse task vectors, shape [K, n]; overwritten.
        weights: K numbers; a negative one turns its task vector round before the election.
        mean: Divide by the sum of the weights of the experts that agree, entry by entry: the
            disjoint mean of the paper. Otherwise the plain sum.

    Returns:
        Shape [n].
    """
    if is_numpy_array(rows):
        from isthmus.methods import kernels

        merged = np.empty(rows.shape[1], rows.dtype)
        kernels.merge_agreeing(rows, np.asarray(weights, rows.dtype), mean, merged)
        return merged
    return merge_agreeing_by_array(rows, weights, mean=mean)


def merge_agreeing_by_array(rows: Array, weights: Sequence[float], *, mean: bool) -> Array:
    """`merge_agreeing` in the array API, for whatever arrays."""
    xp = array_namespace(rows)
    total = xp.zeros_like(rows[0, ...])
    for row, weight in enumerate(weights):
        delta = rows[row, ...]
        delta *= weight
        total += delta
    elected = xp.astype(total >= 0, rows.dtype)
    elected *= 2
    elected -= 1

    merged, divisor = xp.zeros_like(total), xp.zeros_like(total)
    for row, weight in enumerate(weights):
        delta = rows[row, ...]
        delta *= elected
        agrees = xp.astype(delta > 0, rows.dtype)
        delta *= agrees
        merged += delta
        if mean:
            divisor += agrees * weight
    merged *= elected
    if mean:
        divisor += xp.astype(divisor == 0, rows.dtype)
        merged /= divisor
    return merged
