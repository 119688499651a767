"""Conjugate gradients on a batch of quadratics that are given as products (Hestenes and Stiefel 1952)."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.projection.constraints import FREE
from isthmus.projection.quadratic import Quadratic
from isthmus.projection.solution import TOLERANCE, optimality

CHECKED = 10
"""Steps between looks at the residual."""


def conjugate_gradients(
    quadratic: Quadratic, *, tolerance: float = TOLERANCE / 10, max_iterations: int = 2000
) -> tuple[Tensor, int]:
    """The minimiser of J, from d = 0: of least norm where A is singular.

    Not preconditioned, since that would be the least norm in other units.

    Args:
        quadratic: J.
        tolerance: On the residual of `optimality`.
        max_iterations: Products with A.

    Returns:
        d, shape [N, n], and the number of iterations.
    """
    d = torch.zeros_like(quadratic.linear)
    residual = -quadratic.linear
    direction = residual.clone()
    energy = residual.square().sum(dim=1, keepdim=True)
    best, least = d, optimality(quadratic, d, FREE, torch.zeros_like(d))
    for step in range(1, max_iterations + 1):
        image = quadratic.product(direction)
        curvature = (direction * image).sum(dim=1, keepdim=True)
        # A block that is solved, or whose direction A no longer sees, stands still.
        moving = (curvature > 0) & (energy > 0)
        length = torch.where(moving, energy / torch.where(moving, curvature, 1.0), 0.0)
        d = d + length * direction
        residual = residual - length * image
        previous, energy = energy, residual.square().sum(dim=1, keepdim=True)
        ratio = torch.where(moving, energy / torch.where(previous > 0, previous, 1.0), 0.0)
        direction = residual + ratio * direction
        if step % CHECKED == 0 or step == max_iterations or not moving.any():
            # The true residual: the recursion drifts.
            now = optimality(quadratic, d, FREE)
            better = now < least
            best = torch.where(better.unsqueeze(1), d, best)
            least = torch.minimum(now, least)
            if bool((least <= tolerance).all()) or not moving.any():
                break
    return best, step
