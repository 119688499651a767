"""The smallest network with a symmetry: f(x) = a b x, where (a, b) ~ (ca, b/c).

The function depends on the product ab alone, so that the quotient of the plane by the rescalings is
the line of products. Under |f₁ − f₂|² = (a₁b₁ − a₂b₂)² the Fréchet mean on the quotient is the mean of
the products. The mean of the parameters is no function of the orbits: for (a, b) and (−a, −b), the
same function, it is zero.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.errors import MethodError


def product(points: ArrayLike) -> NDArray[np.float64]:
    """The slope ab of f, shape [...], for points (a, b) of shape [..., 2]."""
    pairs = np.asarray(points, dtype=np.float64)
    slopes: NDArray[np.float64] = pairs[..., 0] * pairs[..., 1]
    return slopes


def rescale(points: ArrayLike, c: ArrayLike) -> NDArray[np.float64]:
    """The point (ca, b/c) of the same orbit, shape [..., 2].

    Raises:
        MethodError: Some c is zero.
    """
    factor = np.asarray(c, dtype=np.float64)
    if (factor == 0).any():
        raise MethodError("scaling toy: c = 0 is no rescaling", "take c other than 0")
    pairs = np.asarray(points, dtype=np.float64)
    return np.stack([pairs[..., 0] * factor, pairs[..., 1] / factor], axis=-1)


def balanced(slope: ArrayLike) -> NDArray[np.float64]:
    """The point of an orbit with |a| = |b| and a ≥ 0, the nearest to the origin; shape [..., 2]."""
    ab = np.asarray(slope, dtype=np.float64)
    size = np.sqrt(np.abs(ab))
    return np.stack([size, np.copysign(size, ab)], axis=-1)


def quotient_mean(points: ArrayLike, weights: ArrayLike) -> NDArray[np.float64]:
    """The balanced point whose product is the weighted mean of the products.

    Args:
        points: Shape [K, 2].
        weights: Shape [K], of sum other than 0.

    Returns:
        Shape [2].
    """
    return balanced(np.average(product(points), weights=np.asarray(weights, dtype=np.float64)))


def euclidean_mean(points: ArrayLike, weights: ArrayLike) -> NDArray[np.float64]:
    """The weighted mean of the parameters, shape [2]."""
    pairs = np.asarray(points, dtype=np.float64)
    mean: NDArray[np.float64] = np.average(
        pairs, axis=0, weights=np.asarray(weights, dtype=np.float64)
    )
    return mean
