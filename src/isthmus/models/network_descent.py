"""Sequential quadratic programming on the outputs of a network."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.models.output_objective import OutputObjective
from isthmus.projection.constraints import Constraint
from isthmus.projection.least_norm import ridged
from isthmus.projection.quadratic import BlockQuadratic, ProjectionWarning
from isthmus.projection.solution import optimality
from isthmus.projection.solve import solve

CONVERGED = 1e-3
"""Largest residual that counts as converged: networks compute in float32."""

HALVINGS = 5


@dataclass(frozen=True, eq=False)
class Descent:
    """Coefficients that sweeps have led to.

    Attributes:
        coefficients: d, shape [G · K], float64.
        values: Measured J at the start and after every sweep that lowered it.
        residual: How far d is from the optimality conditions, with the gradient of J at d and the last
            linearisation's curvature.
        undetermined: Which coefficients that linearisation leaves open, shape [G · K].
        notes: Why the sweeps ended, where they did not converge.
    """

    coefficients: Tensor
    values: tuple[float, ...]
    residual: float
    undetermined: Tensor
    notes: tuple[str, ...]

    @property
    def converged(self) -> bool:
        """The residual is at most 1e-3."""
        return self.residual <= CONVERGED


def descend(
    objective: OutputObjective,
    starts: Sequence[Tensor],
    constraint: Constraint,
    *,
    ridge: float = 0.0,
    sweeps: int = 3,
    step: Callable[[], None] = lambda: None,
) -> Descent:
    """Linearise, solve and step, until the optimality conditions hold or J does not fall.

    A step goes all the way to the programme's solution, or is halved until the network itself confirms it.

    Args:
        objective: J.
        starts: Points that satisfy the constraint, shape [G · K] each; the best is taken.
        constraint: On all coefficients.
        ridge: ρ of ρ‖d‖² as a share of the mean diagonal entry of A.
        sweeps: At most so many, at least one.
        step: Is called after every Jacobian-vector product.

    Raises:
        MethodError: a negative ridge, NaN among the derivatives.
    """
    measured = [objective.value(start) for start in starts]
    values = [min(measured)]
    d = starts[measured.index(values[0])]
    notes: list[str] = []
    for _ in range(sweeps):
        quadratic = objective.linearised(d, step)
        with warnings.catch_warnings():
            # What is left open comes back as a note, and convergence is judged by the network's own J.
            warnings.simplefilter("ignore", ProjectionWarning)
            found = solve(quadratic, constraint, ridge=ridge)
        nearer = _searched(objective, d, found.coefficients[0], values[-1])
        if nearer is None:
            slope = quadratic.product(d.unsqueeze(0)) + quadratic.linear
            residual = _residual(quadratic, d, slope[0], constraint, ridge)
            if residual > CONVERGED:
                notes.append(
                    f"not converged (residual {residual:.1e}): sweep {len(values)} lowered the error by no "
                    "step, however small; the network is too far from linear there, or float32 from exact"
                )
            break
        d, value = nearer
        values.append(value)
        residual = _residual(quadratic, d, objective.gradient(d), constraint, ridge)
        if residual <= CONVERGED:
            break
    else:
        notes.append(f"not converged after {sweeps} sweeps (residual {residual:.1e})")
    return Descent(d, tuple(values), residual, found.undetermined[0], tuple(notes))


def _searched(
    objective: OutputObjective, d: Tensor, target: Tensor, value: float
) -> tuple[Tensor, float] | None:
    """The first point on the way back from a target where J is lower."""
    for halving in range(HALVINGS + 1):
        point = torch.lerp(d, target, 0.5**halving)
        reached = objective.value(point)
        if math.isfinite(reached) and reached < value:
            return point, reached
    return None


def _residual(
    quadratic: BlockQuadratic, d: Tensor, slope: Tensor, constraint: Constraint, ridge: float
) -> float:
    """That of the optimality conditions at d, where half the gradient of J is `slope`."""
    row = d.unsqueeze(0)
    here = BlockQuadratic(
        quadratic.matrix, slope.unsqueeze(0) - quadratic.product(row), quadratic.constant
    )
    return float(optimality(ridged(here, ridge), row, constraint).max())
