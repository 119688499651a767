"""A manifold tests itself: does what it claims hold numerically?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from isthmus.geometry.manifold import Manifold

P = TypeVar("P")

_DIFFERENCE = 1e-3


@dataclass(frozen=True)
class Diagnosis:
    """The largest violation found of each claim; rounding when all is well.

    Attributes:
        exp_log: ‖log_x(exp_x u) − u‖.
        distance: |d(x, exp_x u) − ‖u‖|.
        symmetry: |d(x, y) − d(y, x)|.
        gradient: |d/dt ½d(exp_x(tv), y)² + ⟨log_x y, v⟩| at t = 0, the derivative by differences of
            fourth order, which leave 1e-10.
        isometry: |d(gx, gy) − d(x, y)| for random g of the group.
    """

    exp_log: float
    distance: float
    symmetry: float
    gradient: float
    isometry: float


def diagnose(
    manifold: Manifold[P], *, length: float = 0.5, trials: int = 4, seed: int = 0
) -> Diagnosis:
    """Check exp against log, the gradient of ½d² and the isometries at random points.

    Args:
        manifold: The manifold.
        length: Of the tangent vectors that are tried; below the injectivity radius.
        trials: Number of points.
        seed: Of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    x = manifold.random(generator, (trials,))
    u = manifold.scale(length, manifold.random_tangent(generator, x))
    v = manifold.random_tangent(generator, x)
    y = manifold.exp(x, u)
    back = manifold.log(x, y)
    pair = manifold.stack([u, back])
    error = manifold.combine(torch.tensor([1.0, -1.0], dtype=torch.float64), pair)
    distance = manifold.dist(x, y)

    def half_square(t: float) -> torch.Tensor:
        return manifold.dist(manifold.exp(x, manifold.scale(t, v)), y).square() / 2

    h = _DIFFERENCE
    near, far = half_square(h) - half_square(-h), half_square(2 * h) - half_square(-2 * h)
    slope = (8 * near - far) / (12 * h)
    move = manifold.isometry(generator)
    return Diagnosis(
        exp_log=float(manifold.norm(x, error).max()),
        distance=float((distance - length).abs().max()),
        symmetry=float((manifold.dist(y, x) - distance).abs().max()),
        gradient=float((slope + manifold.inner(x, back, v)).abs().max()),
        isometry=float((manifold.dist(move(x), move(y)) - distance).abs().max()),
    )
