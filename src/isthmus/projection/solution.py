"""What a solver returns: coefficients, their J, and how well they satisfy the optimality conditions."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.projection.constraints import Constraint
from isthmus.projection.quadratic import ProjectionWarning, Quadratic

TOLERANCE = 1e-8
"""Largest residual of a solution that counts as converged."""


@dataclass(frozen=True, eq=False)
class Solution:
    """A minimiser of J under a constraint, and what is known about it.

    Attributes:
        coefficients: d, shape [N, n].
        values: J(d) by block, shape [N], without the ridge.
        initial: J(0) by block, shape [N].
        residual: How far the worst block is from the optimality conditions; see `optimality`.
        converged: The residual is at most 1e-8.
        iterations: Of the solver, in the worst case; 0 for direct solutions.
        undetermined: Which coefficients could change without changing J, shape [N, n]; all False where
            the solver does not see the matrices.
    """

    coefficients: Tensor
    values: Tensor
    initial: Tensor
    residual: float
    converged: bool
    iterations: int
    undetermined: Tensor

    @property
    def value(self) -> float:
        """J(d), not negative."""
        return max(float(self.values.sum()), 0.0)

    @property
    def captured(self) -> float:
        """1 − J(d)/J(0); 1 where J(0) = 0, since nothing is left."""
        return captured(self.value, float(self.initial.sum()))


def captured(value: float, initial: float) -> float:
    """1 − J/J(0), the captured energy; 1 where J(0) = 0."""
    return 1 - value / initial if initial > 0 else 1.0


def optimality(
    quadratic: Quadratic, d: Tensor, constraint: Constraint, image: Tensor | None = None
) -> Tensor:
    """The residual of the Karush-Kuhn-Tucker conditions by block, shape [N].

    It is the largest entry of d − P(d − g), g = Ad + b, P the projection onto the constraint, in units in
    which A has unit diagonal, relative to the larger of |b| and |d| there. On a simplex, and where the
    diagonal is not known, one unit serves the whole block.

    Args:
        quadratic: J.
        d: Shape [N, n].
        constraint: What d satisfies.
        image: A d, if known.
    """
    scale = units(quadratic, constraint)
    slope = (quadratic.product(d) if image is None else image) + quadratic.linear
    step = (d - constraint.project(d - slope * scale.square())) / scale
    size = torch.maximum((quadratic.linear * scale).abs(), (d / scale).abs()).amax(dim=1)
    residual: Tensor = step.abs().amax(dim=1) / torch.where(size > 0, size, 1.0)
    return residual


def units(quadratic: Quadratic, constraint: Constraint) -> Tensor:
    """The s for which d/s has a Hessian of about unit size, shape [N, n]."""
    diagonal = quadratic.diagonal()
    if diagonal is None:
        # A product with b is as near as one can come to the largest eigenvalue for one product.
        slope = torch.linalg.vector_norm(quadratic.linear, dim=1, keepdim=True)
        curve = torch.linalg.vector_norm(quadratic.product(quadratic.linear), dim=1, keepdim=True)
        curvature = torch.where(slope > 0, curve / torch.where(slope > 0, slope, 1.0), 0.0)
        diagonal = curvature.expand(quadratic.shape)
    elif constraint.total is not None:
        diagonal = diagonal.amax(dim=1, keepdim=True).expand(quadratic.shape)
    return torch.where(diagonal > 0, diagonal, 1.0).rsqrt()


def solution(
    quadratic: Quadratic,
    d: Tensor,
    constraint: Constraint,
    *,
    iterations: int = 0,
    solved: Quadratic | None = None,
    undetermined: Tensor | None = None,
) -> Solution:
    """Judge coefficients; warns (`ProjectionWarning`) where they have not converged.

    Args:
        quadratic: J.
        d: The coefficients.
        constraint: What they satisfy.
        iterations: Of the solver.
        solved: What was minimised, where it is not J but J with a ridge.
        undetermined: Which coefficients could change without changing J.
    """
    residuals = optimality(quadratic if solved is None else solved, d, constraint)
    residual = float(residuals.max()) if len(residuals) else 0.0
    converged = residual <= TOLERANCE
    if not converged:
        warnings.warn(
            f"projection: {int((residuals > TOLERANCE).sum())} of {len(residuals)} blocks have not "
            f"converged (residual {residual:.1e} after {iterations} iterations); a ridge such as "
            "1e-6 helps",
            ProjectionWarning,
            stacklevel=3,
        )
    if undetermined is None:
        undetermined = torch.zeros_like(d, dtype=torch.bool)
    return Solution(
        coefficients=d,
        values=quadratic.values(d),
        initial=quadratic.constant,
        residual=residual,
        converged=converged,
        iterations=iterations,
        undetermined=undetermined,
    )
