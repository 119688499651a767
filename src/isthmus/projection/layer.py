"""Merging one linear layer on calibration data: the rule, and what it leaves of the error."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.projection import heuristics
from isthmus.projection.constraints import FREE, NON_NEGATIVE, SIMPLEX, Constraint, box
from isthmus.projection.neighbours import diagonal_fisher, kronecker_fisher, regmean
from isthmus.projection.objective import LayerObjective
from isthmus.projection.optimal import reduced_rank
from isthmus.projection.project import project
from isthmus.projection.quadratic import ProjectionWarning
from isthmus.projection.solution import captured
from isthmus.projection.statistics import InputMoments
from isthmus.projection.task_vector_bases import ColumnGroups, Elementwise, RowGroups

BASES = ("scalar", "diagonal", "columns", "elementwise", "optimal")
CONSTRAINTS = ("free", "non_negative", "box", "simplex")

TIES_DENSITY = 0.2
DARE_DENSITY = 0.5
"""What stays of a task vector at the heuristics' points: their papers' usual values."""


@dataclass(frozen=True, slots=True)
class ProjectionRule:
    """Output-space projection (arXiv 2605.29101).

    Attributes:
        basis: One of `BASES`: a coefficient for each expert; for each expert and group of output rows; for
            each expert and input column; for each expert and entry; or all weights of a rank.
        group: Output rows that share a coefficient in the basis `diagonal`; 1 gives each its own.
        constraint: One of `CONSTRAINTS`.
        upper: Upper bound of the box.
        ridge: ρ of ρ‖d‖², as a share of the mean diagonal entry of A. For `optimal` the unknowns are the
            weights themselves.
        directions: Output directions of the basis `optimal`; None for all.

    Raises:
        MethodError: Settings that exclude each other.
    """

    basis: str = "diagonal"
    group: int = 1
    constraint: str = "free"
    upper: float = 1.0
    ridge: float = 0.0
    directions: int | None = None

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise MethodError(
                f"basis: {self.basis} is none of single layers", f"Write one of {', '.join(BASES)}."
            )
        if self.constraint == "simplex" and self.basis not in {"scalar", "diagonal"}:
            raise MethodError(
                f"a simplex does not go with basis: {self.basis}, whose coefficients of all places "
                "would sum to one",
                "Write constraint: box, or basis: diagonal.",
            )
        if self.basis == "optimal" and self.constraint != "free":
            raise MethodError(
                f"basis: optimal has no coefficients that constraint: {self.constraint} could bound",
                "Write constraint: free, or another basis.",
            )
        if self.basis != "optimal" and self.directions is not None:
            raise MethodError(
                f"directions belong to basis: optimal, not to basis: {self.basis}", "Remove them."
            )


@dataclass(frozen=True, slots=True)
class RegMeanRule:
    """RegMean (arXiv 2212.09849).

    Attributes:
        keep: Factor on what is off the diagonal of the moments.
    """

    keep: float = 0.9


@dataclass(frozen=True, slots=True)
class FisherRule:
    """Fisher merging with the layer's own squared error as loss.

    Attributes:
        form: Of the Fisher matrix.
        damping: Of the Kronecker form.
    """

    form: Literal["diagonal", "kronecker"] = "diagonal"
    damping: float = 1e-3


Rule: TypeAlias = ProjectionRule | RegMeanRule | FisherRule


@dataclass(frozen=True, eq=False)
class LayerMerge:
    """The merged weight of one layer.

    Attributes:
        correction: Δ, shape [m, n]: what to add to the base's weight; float64.
        multipliers: d⁽ᵏ⁾ with Δ = Σ_k d⁽ᵏ⁾ ∘ τ_k, of a shape that broadcasts to [K, m, n]; None where the
            correction is not of that kind.
        initial: J(0), the base's error.
        value: J(Δ).
        floor: The least J over all weights.
        heuristics: J of what merges without calibration, by name.
        contained: Which of these the basis holds, so that none of them may have a smaller J.
        residual: Of the solver.
        notes: What calibration leaves open, and whether the solver converged.
    """

    correction: Tensor
    multipliers: Tensor | None
    initial: float
    value: float
    floor: float
    heuristics: Mapping[str, float]
    contained: tuple[str, ...] = ()
    residual: float = 0.0
    notes: tuple[str, ...] = field(default=())

    @property
    def captured(self) -> float:
        """1 − J(Δ)/J(0), the captured energy."""
        return captured(self.value, self.initial)


def merge_layer(
    rule: Rule,
    task_vectors: Tensor,
    objective: LayerObjective,
    moments: Sequence[InputMoments],
    weights: Sequence[float],
    seeds: Sequence[int],
) -> LayerMerge:
    """Merge a layer, and compare with what merges without calibration.

    Args:
        rule: How.
        task_vectors: τ_k, shape [K, m, n], the bias as a last column if there is one.
        objective: J. It decides a projection, and judges the others.
        moments: Of the inputs of each expert's task, which decide RegMean and Fisher merging.
        weights: ω_k, non-negative.
        seeds: One number below 2**128 for each expert, for the draws of DARE.

    Raises:
        MethodError: Shapes that do not fit, NaN, settings that admit no merge.
    """
    tau = task_vectors.to(torch.float64)
    points = _points(tau, weights, seeds)
    found = {point.name: objective.value(point.correction) for point in points}
    if isinstance(rule, ProjectionRule):
        correction, multipliers, residual, notes = _projected(rule, tau, objective)
        contained = _contained(rule, points)
    else:
        correction = _neighbour(rule, tau, moments, weights)
        multipliers, residual, notes, contained = None, 0.0, (), ()
    return LayerMerge(
        correction=correction,
        multipliers=multipliers,
        initial=objective.initial,
        value=max(objective.value(correction), 0.0),
        floor=objective.floor(),
        heuristics=found,
        contained=contained,
        residual=residual,
        notes=notes,
    )


def _projected(
    rule: ProjectionRule, tau: Tensor, objective: LayerObjective
) -> tuple[Tensor, Tensor | None, float, tuple[str, ...]]:
    if rule.basis == "optimal":
        return _regression(rule, objective), None, 0.0, ()
    basis = _basis(rule, tau)
    with warnings.catch_warnings():
        # They come back as notes, with the layer's name.
        warnings.simplefilter("ignore", ProjectionWarning)
        found = project(
            basis, objective, constraint_named(rule.constraint, rule.upper), ridge=rule.ridge
        )
    notes = []
    if found.undetermined is not None:
        notes.append(
            f"the calibration does not determine {found.undetermined}; the least-norm answer is taken"
        )
    if not found.solution.converged:
        notes.append(
            f"the solver has not converged (residual {found.solution.residual:.1e}); a ridge such as "
            "1e-6 helps"
        )
    multipliers = basis.multipliers(found.solution.coefficients)
    return found.correction, multipliers, found.solution.residual, tuple(notes)


def _regression(rule: ProjectionRule, objective: LayerObjective) -> Tensor:
    if rule.ridge:
        strength = rule.ridge * float(objective.gram.diagonal().mean())
        identity = torch.eye(len(objective.gram), dtype=torch.float64)
        objective = LayerObjective(
            objective.gram + strength * identity, objective.cross, objective.squares
        )
    if rule.directions is None:
        return objective.regression()
    return reduced_rank(objective, rule.directions).correction


def _basis(rule: ProjectionRule, tau: Tensor) -> RowGroups | ColumnGroups | Elementwise:
    if rule.basis == "scalar":
        return RowGroups.scalar(tau)
    if rule.basis == "diagonal":
        return RowGroups(tau, torch.arange(tau.shape[1]) // rule.group)
    if rule.basis == "columns":
        return ColumnGroups.diagonal(tau)
    return Elementwise(tau)


def constraint_named(name: str, upper: float) -> Constraint:
    """One of `CONSTRAINTS`; `upper` is the bound of a box."""
    known = {"free": FREE, "non_negative": NON_NEGATIVE, "box": box(0, upper), "simplex": SIMPLEX}
    return known[name]


def _neighbour(
    rule: RegMeanRule | FisherRule,
    tau: Tensor,
    moments: Sequence[InputMoments],
    weights: Sequence[float],
) -> Tensor:
    if isinstance(rule, RegMeanRule):
        return regmean(tau, moments, weights, keep=rule.keep)
    if rule.form == "kronecker":
        return kronecker_fisher(tau, moments, weights, damping=rule.damping)
    return diagonal_fisher(tau, moments, weights)


def _points(
    tau: Tensor, weights: Sequence[float], seeds: Sequence[int]
) -> list[heuristics.Heuristic]:
    return [
        heuristics.task_arithmetic(tau),
        heuristics.soup(tau, weights),
        heuristics.ties(tau, density=TIES_DENSITY, weights=weights),
        heuristics.dare(tau, seeds, density=DARE_DENSITY),
    ]


def _contained(rule: ProjectionRule, points: Sequence[heuristics.Heuristic]) -> tuple[str, ...]:
    """The points that the programme could have chosen."""
    if rule.ridge or rule.directions is not None:
        return ()  # J with a ridge is another one, and a rank holds none of them
    if rule.basis == "optimal":
        return tuple(point.name for point in points)
    lowest, highest, total = 0.0, math.inf, None
    if rule.constraint == "free":
        lowest = -math.inf
    elif rule.constraint == "box":
        highest = rule.upper
    elif rule.constraint == "simplex":
        total = 1.0

    def holds(point: heuristics.Heuristic) -> bool:
        d = point.coefficients
        if rule.basis != "elementwise" and d[0].numel() > 1:
            return False
        bounded = bool((d >= lowest).all() and (d <= highest).all())
        return bounded and (total is None or abs(float(d.sum()) - total) < 1e-9)

    return tuple(point.name for point in points if holds(point))
