"""The loops that numpy cannot run at memory speed, compiled by numba.

Each does in one go over a block that stays in the first cache what takes numpy many goes over a
chunk: counting digits (numpy.bincount takes ten times as long per element, most of it to convert
the bins to int64), trimming, electing and merging, and summing up numbers as they are stored. Where a loop has a form in the array API, for
torch and for reading, a test holds both to the same bits.

Importing numba takes half a second, so this module is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numba
import numpy as np

BLOCK = 2048
"""Elements whose sums stay in the first cache."""

LARGEST_BFLOAT16 = 0x7F7F0000
"""The largest finite number of bfloat16, as bits of float32."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile without holding the interpreter's lock, and keep the result for the next process."""
    # Division as numpy divides: by zero too, and in vector instructions.
    options = {"nogil": True, "error_model": "numpy"}
    try:
        return cast("Callable[..., Any]", numba.njit(cache=True, **options)(function))
    except RuntimeError:  # no folder to keep it in: a read-only installation without a home
        return cast("Callable[..., Any]", numba.njit(**options)(function))


@compiled
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


@compiled
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


@compiled
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


@compiled
def weighted_sum_of_bfloat16(codes, weights, divisor, merged):  # type: ignore[no-untyped-def]
    """Merge bfloat16 numbers in float32, and round; see `weighted.weighted_sum_of_bfloat16`.

    One small loop a step, so that the compiler makes vector instructions of each.

    Args:
        codes: Bit patterns, shape [K, n], uint16.
        weights: Shape [K], float32.
        divisor: float32.
        merged: Bit patterns of the result, shape [n], uint16; overwritten.

    Returns:
        The largest magnitude before rounding, as bits of float32; NaN and infinity are above
        LARGEST_BFLOAT16.
    """
    total = np.empty(BLOCK, np.float32)
    bits = total.view(np.uint32)
    wide = np.empty(BLOCK, np.uint32)
    value = wide.view(np.float32)
    largest = np.zeros(BLOCK, np.uint32)
    for start in range(0, merged.size, BLOCK):
        size = min(BLOCK, merged.size - start)
        for k in range(codes.shape[0]):
            row, weight = codes[k, start : start + size], weights[k]
            for i in range(size):
                wide[i] = row[i] << 16
            if k == 0:
                for i in range(size):
                    total[i] = value[i] * weight
            else:
                for i in range(size):
                    total[i] += value[i] * weight
        if divisor != 1:
            for i in range(size):
                total[i] /= divisor
        for i in range(size):
            wide[i] = bits[i] & 0x7FFFFFFF
        for i in range(size):
            largest[i] = max(largest[i], wide[i])
        # Half a unit of the last place, less one where that place is even: ties go to even.
        for i in range(size):
            wide[i] = ((bits[i] >> 16) & 1) + 0x7FFF
        rounded = merged[start : start + size]
        for i in range(size):
            wide[i] += bits[i]
        for i in range(size):
            rounded[i] = wide[i] >> 16
    return largest.max()
