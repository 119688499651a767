"""The one loop that numpy cannot run at memory speed, compiled by numba.

numpy.bincount takes ten times as long per element, most of it to convert the bins to int64.
Importing numba takes half a second, so this module is imported where it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba


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
