"""Projection of one layer: the best correction of a basis, and how much of the error it removes."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import Tensor

from isthmus.errors import MethodError
from isthmus.projection.basis import Basis
from isthmus.projection.constraints import FREE, Constraint
from isthmus.projection.objective import LayerObjective
from isthmus.projection.quadratic import ProjectionWarning
from isthmus.projection.solution import Solution, solution
from isthmus.projection.solve import solve


@dataclass(frozen=True, eq=False)
class Projection:
    """The merge of one layer that is nearest to the experts' outputs.

    Attributes:
        correction: Δ, shape [m, n]: what to add to the base's weight.
        solution: The coefficients, and what is known about them.
        initial: J(0), the base's error.
        irreducible: J at the solution: the error that no coefficients in this basis remove.
        captured: 1 − irreducible/initial, the captured energy; 1 where the base has no error.
        undetermined: What calibration leaves open, in words, or None.
    """

    correction: Tensor
    solution: Solution
    initial: float
    irreducible: float
    captured: float
    undetermined: str | None


def project(
    basis: Basis,
    objective: LayerObjective,
    constraint: Constraint = FREE,
    *,
    ridge: float = 0.0,
) -> Projection:
    """Minimise a layer's objective over a basis.

    Args:
        basis: Of corrections.
        objective: Of the same layer.
        constraint: On the coefficients of every block.
        ridge: ρ‖d‖² is added, ρ as a share of the mean diagonal entry of A.

    Returns:
        The projection. Warns (`ProjectionWarning`) where calibration does not determine the coefficients,
        which then have the least norm, and where the solver has not converged.

    Raises:
        MethodError: Basis and objective of different layers, a bad ridge, or a simplex on a basis whose
            blocks hold coefficients of several places.
    """
    if constraint.total is not None and not basis.mixes:
        raise MethodError(
            f"a simplex on the basis {type(basis).__name__}, whose coefficients of all places would "
            "sum to one",
            "take a box, or RowGroups",
        )
    quadratic = basis.quadratic(objective)
    known = basis.closed_form(objective) if constraint.free and not ridge else None
    if known is None:
        found = solve(quadratic, constraint, ridge=ridge)
    else:
        found = solution(quadratic, known, constraint)
    unsettled = basis.unsettled(found.undetermined)
    if unsettled is not None:
        warnings.warn(
            f"projection: the calibration does not determine {unsettled}; the least-norm answer is "
            "taken. More or other calibration examples, or a smaller basis, settle it",
            ProjectionWarning,
            stacklevel=2,
        )
    return Projection(
        correction=basis.correction(found.coefficients),
        solution=found,
        initial=objective.initial,
        irreducible=found.value,
        captured=found.captured,
        undetermined=unsettled,
    )
