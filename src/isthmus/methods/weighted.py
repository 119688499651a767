"""Weighted sums over the experts' axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from isthmus.errors import MethodError
from isthmus.methods.method import Settings
from isthmus.typing import Array


def numbers(settings: Settings, name: str) -> list[float]:
    """A numeric parameter of every expert."""
    return [float(cast("float", value)) for value in settings.per_expert[name]]


def shares(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum.

    Raises:
        MethodError: if they sum to zero.
    """
    total = sum(weights)
    if total == 0:
        raise MethodError(
            "the weights sum to zero, so they cannot be normalised",
            "Change a weight, or set normalize: false for the plain weighted sum.",
        )
    return [weight / total for weight in weights]


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
        total += stack[row, ...] * weight
    return total
