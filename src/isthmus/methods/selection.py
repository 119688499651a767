"""The k-th largest magnitude of a tensor that is read in chunks: radix selection.

A non-negative float orders as its bit pattern does. So we count how many elements share each
leading 16-bit pattern, walk to the bin that holds the k-th largest, and look at the next 16 bits
of that bin alone: two readings for float32, four for float64, and the answer is exact. The counts
are integers, hence the same whatever the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from array_api_compat import array_namespace, is_torch_array
from numpy.typing import NDArray

from isthmus.methods.deltas import Deltas
from isthmus.typing import Array

DIGIT = 16
"""Bits looked at in one reading."""

SMALL = 1 << 15
"""Up to so many elements sorting them is cheaper than walking through 2**16 bins."""


def _count(values: Array, low: int, known: int, counts: NDArray[np.int64]) -> None:
    """Add the digits of `values`, shape [n], to `counts`, shape [2**16]."""
    if is_torch_array(values):
        import torch

        signed = torch.int32 if values.dtype == torch.float32 else torch.int64
        digit = torch.abs(values).contiguous().view(signed) >> low
        digit = digit[(digit >> DIGIT) == known] & 0xFFFF
        counts += torch.bincount(digit, minlength=1 << DIGIT).cpu().numpy()
        return
    from isthmus.methods.kernels import count_digits

    unsigned = np.uint32 if values.dtype == np.float32 else np.uint64
    sign_free = unsigned(np.iinfo(unsigned).max >> 1)
    count_digits(values.view(unsigned), sign_free, unsigned(low), unsigned(known), counts)


def kth_largest_magnitudes(deltas: Deltas, ranks: Sequence[int]) -> list[float]:
    """For each task vector, the k-th largest absolute value.

    Args:
        deltas: The task vectors of one tensor. They hold no NaN.
        ranks: For each task vector k, counted from 1, at most its number of elements.

    Returns:
        One magnitude for each task vector, that of one of its elements.
    """
    if deltas.size <= SMALL:
        return _by_sorting(deltas, ranks)
    known = [0] * len(ranks)
    left = list(ranks)
    for low in range(8 * deltas.itemsize - DIGIT, -1, -DIGIT):
        counts = np.zeros((len(ranks), 1 << DIGIT), np.int64)
        for chunk in deltas:
            for row in range(len(ranks)):
                _count(chunk.rows[row, ...], low, known[row], counts[row])
        for row, histogram in enumerate(counts):
            # above[d]: how many elements of the bin have a digit larger than d
            above = np.cumsum(histogram[::-1])[::-1] - histogram
            digit = int(np.argmax(above < left[row]))
            left[row] -= int(above[digit])
            known[row] = known[row] << DIGIT | digit
    single = deltas.itemsize == 4
    bits, number = (np.uint32, np.float32) if single else (np.uint64, np.float64)
    return [float(np.array(pattern, bits).view(number)) for pattern in known]


def _by_sorting(deltas: Deltas, ranks: Sequence[int]) -> list[float]:
    xp = array_namespace(next(iter(deltas)).rows)
    magnitudes = xp.sort(xp.concat([xp.abs(chunk.rows) for chunk in deltas], axis=1), axis=1)
    return [float(magnitudes[row, -rank]) for row, rank in enumerate(ranks)]
