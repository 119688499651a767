"""Accelerated projected gradients on a batch of quadratics that are given as products.

FISTA (Beck and Teboulle 2009) with momentum that restarts where it points uphill (O'Donoghue and Candès
2015, arXiv 1204.3982, gradient scheme), block by block. Under bounds alone the coefficients are first scaled
until A has unit diagonal, which leaves bounds bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.projection.constraints import Constraint
from isthmus.projection.quadratic import Quadratic
from isthmus.projection.solution import TOLERANCE, optimality, units

CHECKED = 10
"""Steps between looks at the residual."""

POWER_STEPS = 10
"""Steps of the power method, for a first guess of the largest eigenvalue; it is corrected on the way."""


def accelerated(
    quadratic: Quadratic,
    constraint: Constraint,
    start: Tensor,
    *,
    tolerance: float = TOLERANCE / 10,
    max_iterations: int = 10000,
) -> tuple[Tensor, int]:
    """A minimiser of J under a constraint.

    Args:
        quadratic: J.
        constraint: On the coefficients.
        start: Shape [N, n].
        tolerance: On the residual of `optimality`.
        max_iterations: Products with A.

    Returns:
        d, shape [N, n], and the number of iterations. Of all iterates that were looked at, the one with
        the smallest residual, block by block.
    """
    scale = units(quadratic, constraint)
    bound = _largest_eigenvalue(quadratic, scale)
    d = constraint.project(start)
    image = quadratic.product(d)
    before, image_before = d, image
    momentum = torch.ones_like(bound)
    best, least = d, optimality(quadratic, d, constraint, image)
    step = 0
    while step < max_iterations and bool((least > tolerance).any()):
        step += 1
        following = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
        push = (momentum - 1) / following
        ahead = d + push * (d - before)
        image_ahead = image + push * (image - image_before)
        slope = image_ahead + quadratic.linear
        new = constraint.project(ahead - slope * scale.square() / bound)
        image_new = quadratic.product(new)
        move = new - ahead
        length = (move / scale).square().sum(dim=1, keepdim=True)
        curve = (move * (image_new - image_ahead)).sum(dim=1, keepdim=True)
        steep = curve > bound * length * (1 + 1e-9)
        # Where the step was too long it is taken back, and the next one is shorter.
        bound = torch.where(steep, 1.1 * curve / torch.where(length > 0, length, 1.0), bound)
        uphill = ((ahead - new) / scale.square() * (new - d)).sum(dim=1, keepdim=True) > 0
        momentum = torch.where(uphill | steep, 1.0, following)
        before = torch.where(steep | uphill, torch.where(steep, d, new), d)
        image_before = torch.where(steep | uphill, torch.where(steep, image, image_new), image)
        d, image = torch.where(steep, d, new), torch.where(steep, image, image_new)
        if step % CHECKED == 0 or step == max_iterations:
            image = quadratic.product(d)  # sums of products drift
            now = optimality(quadratic, d, constraint, image)
            better = now < least
            best = torch.where(better.unsqueeze(1), d, best)
            least = torch.minimum(now, least)
    return best, step


def _largest_eigenvalue(quadratic: Quadratic, scale: Tensor) -> Tensor:
    """About the largest eigenvalue of the scaled A by block, shape [N, 1]; 1 where A is zero."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(quadratic.shape, generator=generator, dtype=torch.float64)
    vector, norm = noise.to(scale.device), scale.new_ones(len(scale), 1)
    for _ in range(POWER_STEPS):
        vector = vector / torch.where(norm > 0, norm, 1.0)
        vector = scale * quadratic.product(scale * vector)
        norm = torch.linalg.vector_norm(vector, dim=1, keepdim=True)
    return torch.where(norm > 0, norm, 1.0)
