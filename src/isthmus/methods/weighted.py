"""Weighted sums over the experts' axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from isthmus.errors import MethodError
from isthmus.methods.method import Settings, WeightedSum
from isthmus.typing import Array, StorageArray

CANCELLED = 1e-9
"""Weights whose sum is this small beside them sum to zero but for rounding."""


def numbers(settings: Settings, name: str) -> list[float]:
    """A numeric parameter of every expert."""
    return [float(cast("float", value)) for value in settings.per_expert[name]]


def divisor(weights: Sequence[float], *, normalize: bool) -> float:
    """What the weighted sum is divided by: the sum of the weights, or 1.

    Raises:
        MethodError: if the weights shall be normalised and sum to zero.
    """
    if not normalize:
        return 1.0
    total = sum(weights)
    if abs(total) <= CANCELLED * sum(map(abs, weights)):
        raise MethodError(
            "the weights sum to zero, so they cannot be normalised",
            "Change a weight, or set normalize: false for the plain weighted sum.",
        )
    return total


def weighted_sum(stack: Array, weights: Sequence[float]) -> Array:
    """sum_k w_k x_k, in the order of the experts.

    A loop over rows rather than a matrix product: the same bytes on every machine, and with one
    expert at weight 1 exactly that expert.

    Args:
        stack: Shape [K, n].
        weights: K numbers.

    Returns:
        Shape [n].
    """
    total = stack[0, ...] * weights[0]
    for row, weight in enumerate(weights[1:], start=1):
        total += stack[row, ...] if weight == 1 else stack[row, ...] * weight
    return total


def weighted_sum_of_bfloat16(
    codes: StorageArray, weighted: WeightedSum, merged: StorageArray
) -> bool:
    """A weighted sum of bfloat16 numbers in one go over their bits, for large merges.

    Computes in float32 as `weighted_sum` does, and rounds to nearest, ties to even: the bits are
    the same.

    Args:
        codes: Bit patterns, shape [K, n], uint16.
        weighted: What to compute.
        merged: Bit patterns of the result, shape [n], uint16; overwritten.

    Returns:
        Whether all results are finite before and after rounding. If not, their bits mean nothing.
    """
    from isthmus.methods import kernels

    weights = np.asarray(weighted.weights, np.float32)
    largest = kernels.weighted_sum_of_bfloat16(codes, weights, np.float32(weighted.divisor), merged)
    return bool(largest <= kernels.LARGEST_BFLOAT16)
