"""The one loop that numpy cannot run at memory speed, compiled by numba.

numpy.bincount takes ten times as long per element, most of it to convert the bins to int64.
Importing numba takes half a second, so this module is imported where it is needed.
"""

from __future__ import annotations

import numba


@numba.njit(nogil=True, cache=True)
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
