"""Bounds on a batch of quadratics that are given as products: conjugate gradients on faces.

MPRGP, modified proportioning with reduced gradient projections (Dostál 2009, Optimal Quadratic Programming
Algorithms): conjugate gradients among the coefficients that are free; where a step would
leave the bounds, it stops there and a projected gradient step enlarges the active set; where the multipliers
outweigh the free gradient, a step along them makes it smaller. The coefficients are first scaled until A
has unit diagonal, which leaves bounds bounds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from isthmus.projection.constraints import Constraint
from isthmus.projection.quadratic import Quadratic
from isthmus.projection.solution import TOLERANCE, optimality, units

CHECKED = 10
"""Steps between looks at the residual."""

POWER_STEPS = 10
"""Steps of the power method, for a first guess of the largest eigenvalue; it is corrected on the way."""


def proportioning(
    quadratic: Quadratic,
    constraint: Constraint,
    start: Tensor,
    *,
    tolerance: float = TOLERANCE / 10,
    max_iterations: int = 5000,
) -> tuple[Tensor, int]:
    """A minimiser of J between bounds.

    Args:
        quadratic: J.
        constraint: Bounds, no total.
        start: Shape [N, n].
        tolerance: On the residual of `optimality`.
        max_iterations: Steps, of one or two products with A.

    Returns:
        d, shape [N, n], and the number of iterations. Of all iterates that were looked at, the one with
        the smallest residual, block by block.
    """
    scale = units(quadratic, constraint)
    lower, upper = constraint.lower / scale, constraint.upper / scale
    linear = quadratic.linear * scale

    def product(v: Tensor) -> Tensor:
        return scale * quadratic.product(scale * v)

    u = torch.minimum(torch.maximum(start / scale, lower), upper)
    slope = product(u) + linear
    largest = _largest_eigenvalue(product, u)
    direction, chopped = _parts(slope, u, lower, upper)
    best = (u * scale).clamp(constraint.lower, constraint.upper)
    least = optimality(quadratic, best, constraint)
    step = 0
    while step < max_iterations and bool((least > tolerance).any()):
        step += 1
        free, chopped = _parts(slope, u, lower, upper)
        # The free gradient counts as far as a projected step of it would go.
        reduced = (u - torch.minimum(torch.maximum(u - free / largest, lower), upper)) * largest
        release = _dot(chopped, chopped) > _dot(reduced, free)
        p = torch.where(release, chopped, direction)
        image = product(p)
        curve, size = _dot(p, image), _dot(p, p)
        largest = torch.maximum(largest, curve / torch.where(size > 0, size, 1.0))
        curved = curve > 0
        wanted = torch.where(
            curved, _dot(slope, p) / torch.where(curved, curve, 1.0), torch.inf
        ).clamp(min=0)
        room = torch.where(p > 0, u - lower, torch.where(p < 0, u - upper, torch.inf))
        reach = torch.where(p != 0, room / torch.where(p != 0, p, 1.0), torch.inf)
        reach = reach.amin(dim=1, keepdim=True).clamp(min=0)
        length = torch.minimum(wanted, reach)
        length = torch.where(torch.isfinite(length), length, 0.0)
        u = torch.minimum(torch.maximum(u - length * p, lower), upper)
        slope = slope - length * image
        stopped = (reach < wanted) & ~release
        if stopped.any():
            free, _ = _parts(slope, u, lower, upper)
            expanded = torch.minimum(torch.maximum(u - free / largest, lower), upper)
            u = torch.where(stopped, expanded, u)
            slope = torch.where(stopped, product(u) + linear, slope)
        free, _ = _parts(slope, u, lower, upper)
        conjugate = torch.where(
            stopped | release | ~curved, 0.0, _dot(free, image) / torch.where(curved, curve, 1.0)
        )
        direction = free - conjugate * p
        if step % CHECKED == 0 or step == max_iterations:
            slope = product(u) + linear  # sums of products drift
            d = (u * scale).clamp(constraint.lower, constraint.upper)
            now = optimality(quadratic, d, constraint, (slope - linear) / scale)
            better = now < least
            best = torch.where(better.unsqueeze(1), d, best)
            least = torch.minimum(now, least)
    return best, step


def _parts(slope: Tensor, u: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the free coefficients, and that of the others as far as it points inwards."""
    at_lower, at_upper = u <= lower, u >= upper
    free = torch.where(at_lower | at_upper, 0.0, slope)
    inwards = (at_lower & (slope < 0) & ~at_upper) | (at_upper & (slope > 0) & ~at_lower)
    return free, torch.where(inwards, slope, 0.0)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dim=1, keepdim=True)


def _largest_eigenvalue(product: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    """About the largest eigenvalue of A by block, shape [N, 1]; 1 where A is zero."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device)
    norm = like.new_ones(len(like), 1)
    for _ in range(POWER_STEPS):
        vector = product(vector / torch.where(norm > 0, norm, 1.0))
        norm = torch.linalg.vector_norm(vector, dim=1, keepdim=True)
    return torch.where(norm > 0, norm, 1.0)
