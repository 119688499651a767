"""The loops that numpy cannot run at memory speed, compiled by numba.

Each does in one go over a block that stays in the first cache what takes numpy many goes over a
chunk: counting digits (numpy.bincount takes ten times as long per element, most of it to convert
the bins to int64), trimming, electing and merging. Where a loop has a form in the array API, for
torch and for reading, a test holds both to the same bits.

Importing numba takes half a second, so this module is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

BLOCK = 2048
"""Elements whose sums stay in the first cache."""


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compile without holding the interpreter's lock, and keep the result for the next process."""
    compiled: Any
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no folder to keep it in: a read-only installation without a home
        compiled = numba.njit(nogil=True)(function)
    return compiled  # type: ignore[no-any-return]


@_compiled
def count_digits(bits, sign_free, low, known, counts):  # type: ignore[no-untyped-def]
    """Count the 16 bits above bit `low` of those elements whose higher bits are `known`.

    Args:
        bits: Bit patterns, shape [n], uint32 or uint64.
        sign_free: Mask that clears the sign bit.
        low: Position of the lowest of the 16 bits.
        known: The bits above them.
        counts: Shape [2**16], int64; added to.
    """
    for i in range(bits.size):
        digit = (bits[i] & sign_free) >> low
        if digit >> 16 == known:
            counts[digit & 0xFFFF] += 1


@_compiled
def trim(rows, thresholds):  # type: ignore[no-untyped-def]
    """Multiply by zero what is smaller than its row's threshold; see `sparsify.trim`.

    Args:
        rows: Shape [K, n], float32 or float64; overwritten.
        thresholds: Shape [K], of the same type.
    """
    zero, one = rows.dtype.type(0), rows.dtype.type(1)
    for k in range(rows.shape[0]):
        threshold = thresholds[k]
        row = rows[k]
        for i in range(row.size):
            value = row[i]
            row[i] = value * (one if abs(value) >= threshold else zero)


@_compiled
def merge_agreeing(rows, weights, mean, merged):  # type: ignore[no-untyped-def]
    """Elect a sign for every entry and merge the rows that have it; see `consensus`.

    Args:
        rows: Shape [K, n], float32 or float64; overwritten.
        weights: Shape [K], of the same type.
        mean: Whether to divide by the weight of the rows that agree.
        merged: Shape [n]; the result.
    """
    zero, one = rows.dtype.type(0), rows.dtype.type(1)
    elected = np.empty(BLOCK, rows.dtype)
    divisor = np.empty(BLOCK, rows.dtype)
    for start in range(0, merged.size, BLOCK):
        size = min(BLOCK, merged.size - start)
        total = merged[start : start + size]
        total[:] = zero
        for k in range(rows.shape[0]):
            row, weight = rows[k, start : start + size], weights[k]
            for i in range(size):
                value = row[i] * weight
                row[i] = value
                total[i] += value
        for i in range(size):
            elected[i] = one if total[i] >= zero else -one
            divisor[i] = zero
            total[i] = zero
        for k in range(rows.shape[0]):
            row, weight = rows[k, start : start + size], weights[k]
            for i in range(size):
                value = row[i] * elected[i]
                agrees = one if value > zero else zero
                total[i] += value * agrees
                divisor[i] += agrees * weight
        for i in range(size):
            total[i] *= elected[i]
            if mean:
                total[i] /= divisor[i] + (one if divisor[i] == zero else zero)
