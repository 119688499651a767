"""One door to the solvers: which one serves which quadratic and constraint."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.projection.constraints import FREE, Constraint
from isthmus.projection.least_norm import (
    FORMED,
    WithRidge,
    factorised,
    least_norm,
    null_space,
    ridged,
    unit_scale,
)
from isthmus.projection.proportioning import proportioning
from isthmus.projection.quadratic import BlockQuadratic, Quadratic
from isthmus.projection.solution import TOLERANCE, Solution, optimality, solution, units

PULL = 1e-9
"""Pull towards zero in singular blocks, as a share of the largest diagonal entry: about the least norm."""


def solve(quadratic: Quadratic, constraint: Constraint = FREE, *, ridge: float = 0.0) -> Solution:
    """Minimise J(d) + ρ‖d‖² under a constraint.

    Unconstrained: Cholesky, least norm where A is singular, conjugate gradients for large products.
    Constrained: an active-set method on a simplex and up to 64 unknowns in a block, conjugate gradients on faces
    beyond, both judged by their residual. Where A is singular, the active-set method returns about the least norm
    among the minimisers.

    Args:
        quadratic: J.
        constraint: On the coefficients of every block.
        ridge: ρ as a share of the mean diagonal entry of A over all blocks.

    Returns:
        The solution, J without the ridge. Warns (`ProjectionWarning`) where it has not converged.

    Raises:
        MethodError: A negative ridge, or a ridge on a product whose diagonal is not known.
    """
    if constraint.free:
        return least_norm(quadratic, ridge=ridge)
    if not 0 <= ridge < float("inf"):
        raise MethodError(f"a ridge of {ridge}", "give 0 or a positive share such as 1e-6")
    if quadratic.shape[1] <= FORMED or constraint.total is not None:
        return _by_active_sets(quadratic.formed(), constraint, ridge)
    penalised: Quadratic = quadratic
    if ridge:
        penalised = WithRidge.of(quadratic, ridge)
    d, steps = proportioning(penalised, constraint, torch.zeros_like(quadratic.linear))
    return solution(quadratic, d, constraint, iterations=steps, solved=penalised)


def _by_active_sets(quadratic: BlockQuadratic, constraint: Constraint, ridge: float) -> Solution:
    penalised = ridged(quadratic, ridge)
    singular = factorised(penalised.matrix)[2]
    undetermined = torch.zeros_like(quadratic.linear, dtype=torch.bool)
    if not singular.any():
        d, steps = _active_sets(penalised, constraint, None)
    else:
        pull = _pulls(penalised.matrix, singular)
        pulled = BlockQuadratic(
            penalised.matrix + torch.diag_embed(pull), penalised.linear, penalised.constant
        )
        d, steps = _active_sets(pulled, constraint, None)
    missed = optimality(penalised, d, constraint) > TOLERANCE
    if missed.any():
        d[missed], more = _retried(penalised.only(missed), constraint, d[missed])
        steps = max(steps, more)
    if singular.any():
        undetermined = _undetermined(penalised, singular, constraint, d)
    return solution(
        quadratic, d, constraint, iterations=steps, solved=penalised, undetermined=undetermined
    )


def _retried(quadratic: BlockQuadratic, constraint: Constraint, d: Tensor) -> tuple[Tensor, int]:
    """Better coefficients of blocks where the first answer is not good enough, if there are any."""
    # In singular blocks the pull also moves what A hardly sees: from there on, without it.
    again, steps = _active_sets(quadratic, constraint, d)
    if constraint.total is None:
        again, more = proportioning(quadratic, constraint, again)
        steps = max(steps, more)
    before, after = (optimality(quadratic, one, constraint) for one in (d, again))
    return torch.where((after < before).unsqueeze(1), again, d), steps


def _active_sets(
    quadratic: BlockQuadratic, constraint: Constraint, start: Tensor | None
) -> tuple[Tensor, int]:
    from isthmus.projection.active_set import solve_blocks

    blocks, n = quadratic.shape
    if start is None:
        start = constraint.project(torch.zeros_like(quadratic.linear))
    d = start.detach().cpu().contiguous().clone()
    steps = solve_blocks(
        quadratic.matrix.detach().cpu().contiguous().numpy(),
        quadratic.linear.detach().cpu().contiguous().numpy(),
        float(constraint.lower),
        float(constraint.upper),
        float(constraint.total or 0.0),
        d.numpy(),
        20 + 10 * n,
    )
    return d.to(quadratic.linear.device).reshape(blocks, n), int(steps)


def _pulls(matrix: Tensor, singular: Tensor) -> Tensor:
    """The pull on each coefficient, shape [N, 1] expanded: none in regular blocks."""
    largest = torch.diagonal(matrix, dim1=1, dim2=2).amax(dim=1, keepdim=True)
    strength = PULL * torch.where(largest > 0, largest, 1.0)
    pulls: Tensor = torch.where(singular.unsqueeze(1), strength, 0.0).expand(matrix.shape[:2])
    return pulls


def _undetermined(
    quadratic: BlockQuadratic, singular: Tensor, constraint: Constraint, d: Tensor
) -> Tensor:
    """Which coefficients some null direction of A moves, and no multiplier holds: shape [N, n]."""
    matrix = quadratic.matrix[singular]
    multipliers = quadratic.product(d) + quadratic.linear
    if constraint.total is not None:
        # Null directions of a simplex sum to zero, and its multipliers are counted from their mean.
        largest = torch.diagonal(matrix, dim1=1, dim2=2).amax(dim=1).reshape(-1, 1, 1)
        matrix = matrix + torch.where(largest > 0, largest, 1.0)
        multipliers = multipliers - (multipliers * d).sum(dim=1, keepdim=True) / constraint.total
    _, vectors, vanish = null_space(matrix)
    directions = unit_scale(matrix).unsqueeze(-1) * vectors
    directions = directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)
    moved = torch.zeros(quadratic.matrix.shape[:2], dtype=torch.bool, device=d.device)
    moved[singular] = ((directions.square() > 1e-12) & vanish.unsqueeze(1)).any(dim=2)
    scale = units(quadratic, constraint)
    size = torch.maximum((quadratic.linear * scale).abs(), (d / scale).abs())
    loose = (multipliers * scale).abs() <= TOLERANCE * size.amax(dim=1, keepdim=True)
    return moved & loose & (constraint.lower < constraint.upper)
