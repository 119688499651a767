"""Diagnosis of a layer before the merge: what every basis and every heuristic would leave of its error.

J of each merge is known from the moments of the calibration inputs alone, so no network is run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from isthmus.errors import MethodError
from isthmus.projection import heuristics
from isthmus.projection.layer import DARE_DENSITY, TIES_DENSITY
from isthmus.projection.objective import (
    LayerObjective,
    expert_objective,
    stacked,
    task_weights,
)
from isthmus.projection.optimal import expert_spectrum, reduced_rank
from isthmus.projection.project import project
from isthmus.projection.quadratic import ProjectionWarning
from isthmus.projection.solution import captured
from isthmus.projection.statistics import InputMoments
from isthmus.projection.task_vector_bases import FORMED, ColumnGroups, RowGroups, TaskVectorBasis

SCALES = tuple(tenths / 10 for tenths in range(1, 11))
"""λ of task arithmetic, among which the best is chosen."""

HEURISTICS = ("soup", "task arithmetic", "TIES", "DARE")
BASES = ("scalar", "diagonal", "columns", "optimal")
"""Bases of a projection, those with fewer coefficients first."""

CONTAINS = {
    "scalar": ("soup", "task arithmetic"),
    "diagonal": ("scalar", "soup", "task arithmetic"),
    "columns": ("scalar", "soup", "task arithmetic"),
    "optimal": ("scalar", "diagonal", "columns", *HEURISTICS),
}
"""Which merges are points of a basis, so that its solution has no larger J."""

ROUNDING = 1e-7
"""Share of J(0) by which a solution may exceed a point of its basis."""


@dataclass(frozen=True)
class LayerDiagnosis:
    """What merges leave of one layer's error.

    Attributes:
        initial: J(0), the base's error.
        heuristics: J by name, as in `HEURISTICS`; task arithmetic at λ = 1, TIES and DARE at their papers'
            usual densities.
        scales: J of task arithmetic by λ.
        projections: The least J by basis, without constraints; `columns` is missing where it has more than
            2,048 coefficients.
        ranks: The least J of corrections of a rank, by powers of two.
        bounds: What the leading output directions leave if every example may choose its own coefficients:
            no correction of that rank has a smaller J.
        unknowns: Coefficients of each basis for each output.
        inputs: How many inputs of equal weight the calibration is worth.
        unchanged: Experts, from 0, whose layer equals the base's.
        silent: Tasks, from 0, whose inputs are all zero, the constant of a bias apart.
        notes: What calibration leaves open.
    """

    initial: float
    heuristics: Mapping[str, float]
    scales: Mapping[float, float]
    projections: Mapping[str, float]
    ranks: Mapping[int, float]
    bounds: Mapping[int, float]
    unknowns: Mapping[str, float]
    inputs: float
    unchanged: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    def value(self, merge: str) -> float:
        """J of a heuristic or a projection.

        Raises:
            KeyError: It was not computed.
        """
        found = self.heuristics if merge in self.heuristics else self.projections
        return found[merge]

    @property
    def best_scale(self) -> float:
        """λ at which task arithmetic leaves least."""
        return min(self.scales, key=lambda scale: self.scales[scale])

    @property
    def best_heuristic(self) -> tuple[str, float]:
        """The name of the heuristic that leaves least, and its J; of equal ones the simplest."""
        scale = self.best_scale
        values = {**self.heuristics, scaled(scale): self.scales[scale]}
        name = min(values, key=lambda heuristic: values[heuristic])
        return name, values[name]

    def captured(self, value: float) -> float:
        """1 − J/J(0); 1 where both are zero, −∞ where the base alone is without error."""
        if self.initial == 0 and value > 0:
            return float("-inf")
        return captured(value, self.initial)

    def expected(self, merge: str) -> float:
        """J to expect on as many new inputs: infinite where inputs are no more than unknowns.

        J (N + p)/(N − p), the final prediction error of Akaike (1969), for p unknowns of each output that
        were chosen on N inputs.
        """
        if self.initial == 0:
            return self.value(merge)
        p = self.unknowns.get(merge, 0.0)
        if self.inputs <= p:
            return float("inf")
        return self.value(merge) * (self.inputs + p) / (self.inputs - p)

    def at_rank(self, rank: int) -> float:
        """The least J of corrections of a rank that is a power of two; beyond the layer's, of all."""
        return self.ranks.get(rank, self.projections["optimal"])

    def bound_at_rank(self, rank: int) -> float:
        """What no correction of that rank goes below; beyond the layer's rank nothing."""
        return self.bounds.get(rank, 0.0)


def diagnose_layer(
    task_vectors: Tensor,
    moments: Sequence[InputMoments],
    weights: Sequence[float] | None = None,
    *,
    seeds: Sequence[int],
    bias: bool = False,
) -> LayerDiagnosis:
    """Find J of every merge of one layer, each expert's layer being the target on its own inputs.

    Args:
        task_vectors: τ_k, shape [K, m, n], the bias as a last column if there is one.
        moments: Of each expert's inputs, shape [n, n].
        weights: ω_k of an input of task k, non-negative. If None every task counts alike, whatever the
            number of its inputs.
        seeds: One number below 2**128 for each expert, for the draws of DARE.
        bias: Whether the last column is one, so that the last input is a constant.

    Raises:
        MethodError: Shapes that do not fit, NaN, bad weights or seeds, no inputs at all; or a projection that
            is worse than a point of its basis, which is a bug.
    """
    tau = stacked(task_vectors)
    omega = _per_task(moments) if weights is None else task_weights(weights, len(tau))
    objective = expert_objective(tau, moments, omega)
    changed = tau.reshape(len(tau), -1).ne(0).any(dim=1)
    projections, unknowns, notes = _projections(tau[changed], objective)
    ranks, bounds = _by_rank(tau, moments, omega, objective)
    seen = tau.shape[2] - bias
    found = LayerDiagnosis(
        initial=objective.initial,
        heuristics=_heuristics(tau, objective, seeds),
        scales={
            scale: _value(objective, heuristics.task_arithmetic(tau, scale)) for scale in SCALES
        },
        projections=projections,
        ranks=ranks,
        bounds=bounds,
        unknowns=unknowns,
        inputs=_worth(moments, omega),
        unchanged=tuple(k for k, moved in enumerate(changed.tolist()) if not moved),
        silent=tuple(k for k, one in enumerate(moments) if not one.gram[:seen, :seen].any()),
        notes=notes,
    )
    _check(found)
    return found


def scaled(scale: float) -> str:
    """The name of task arithmetic at a λ."""
    return "task arithmetic" if scale == 1 else f"task arithmetic, λ = {scale:g}"


def in_all(layers: Sequence[LayerDiagnosis]) -> LayerDiagnosis:
    """The sums over layers; λ of task arithmetic is the same in all.

    Only bases that every layer has are there. What belongs to single layers, from `unknowns` on, is empty.

    Args:
        layers: At least one.
    """
    ranks = sorted({rank for layer in layers for rank in layer.ranks})
    bases = [basis for basis in BASES if all(basis in layer.projections for layer in layers)]
    return LayerDiagnosis(
        initial=sum(layer.initial for layer in layers),
        heuristics={name: sum(layer.heuristics[name] for layer in layers) for name in HEURISTICS},
        scales={scale: sum(layer.scales[scale] for layer in layers) for scale in SCALES},
        projections={basis: sum(layer.projections[basis] for layer in layers) for basis in bases},
        ranks={rank: sum(layer.at_rank(rank) for layer in layers) for rank in ranks},
        bounds={rank: sum(layer.bound_at_rank(rank) for layer in layers) for rank in ranks},
        unknowns={},
        inputs=0.0,
    )


def _per_task(moments: Sequence[InputMoments]) -> list[float]:
    return [1 / max(one.count, 1) for one in moments]


def _worth(moments: Sequence[InputMoments], omega: Sequence[float]) -> float:
    """The effective number of weighted inputs, (Σ ω)²/Σ ω² (Kish 1965)."""
    total = sum(w * one.count for w, one in zip(omega, moments, strict=True))
    squares = sum(w * w * one.count for w, one in zip(omega, moments, strict=True))
    return total * total / squares


def _value(objective: LayerObjective, point: heuristics.Heuristic) -> float:
    return max(objective.value(point.correction), 0.0)


def _heuristics(tau: Tensor, objective: LayerObjective, seeds: Sequence[int]) -> dict[str, float]:
    points = (
        heuristics.soup(tau),
        heuristics.task_arithmetic(tau),
        heuristics.ties(tau, density=TIES_DENSITY),
        heuristics.dare(tau, seeds, density=DARE_DENSITY),
    )
    return {point.name: _value(objective, point) for point in points}


def _projections(
    tau: Tensor, objective: LayerObjective
) -> tuple[dict[str, float], dict[str, float], tuple[str, ...]]:
    """The least J by basis, unknowns for each output, and notes; of the experts that changed the layer."""
    m, n = objective.shape
    experts = len(tau)
    unknowns = {"scalar": experts / m, "diagonal": float(experts), "optimal": float(n)}
    affordable = experts * n <= FORMED
    if affordable:
        unknowns["columns"] = experts * n / m
    if not experts:  # no expert asks for anything
        return dict.fromkeys(unknowns, 0.0), unknowns, ()
    bases: dict[str, TaskVectorBasis] = {
        "scalar": RowGroups.scalar(tau),
        "diagonal": RowGroups.diagonal(tau),
    }
    if affordable:
        bases["columns"] = ColumnGroups.diagonal(tau)
    values, notes = {}, []
    for name, basis in bases.items():
        with warnings.catch_warnings():
            # They come back as notes, for the caller to name the layer.
            warnings.simplefilter("ignore", ProjectionWarning)
            found = project(basis, objective)
        values[name] = found.irreducible
        if found.undetermined is not None:
            notes.append(f"{name}: {int(found.solution.undetermined.sum())} of {basis.dimension}")
    values["optimal"] = objective.floor()
    return values, unknowns, tuple(notes)


def _by_rank(
    tau: Tensor,
    moments: Sequence[InputMoments],
    omega: Sequence[float],
    objective: LayerObjective,
) -> tuple[dict[int, float], dict[int, float]]:
    """The least J of corrections of rank 1, 2, 4, ... below the layer's, and what bounds it."""
    ranks = list(_powers(min(objective.shape)))
    if not ranks:
        return {}, {}
    gains = reduced_rank(objective, ranks[-1]).captured.tolist()
    spectrum = expert_spectrum(tau, moments, omega)

    def left(share: float) -> float:
        return max((1 - share) * objective.initial, 0.0)

    return (
        {rank: left(gains[min(rank, len(gains) - 1)]) for rank in ranks},
        {rank: left(spectrum.captured(rank)) for rank in ranks},
    )


def _powers(limit: int) -> Iterator[int]:
    rank = 1
    while rank < limit:
        yield rank
        rank *= 2


def _check(found: LayerDiagnosis) -> None:
    """Refuse to go on where a solution is worse than a point of its basis."""
    slack = ROUNDING * found.initial
    known = {*found.heuristics, *found.projections}
    for basis, points in CONTAINS.items():
        if basis not in found.projections:
            continue
        values = {name: found.value(name) for name in points if name in known}
        if "task arithmetic" in points:
            values |= {scaled(scale): value for scale, value in found.scales.items()}
        for name, value in values.items():
            if found.projections[basis] > value + slack:
                raise MethodError(
                    f"projection in the basis {basis} has J = {found.projections[basis]:.6e}, more "
                    f"than {name} with {value:.6e}, which is in that basis",
                    "This is a bug of Isthmus: please report it, with the models if you can.",
                )
    for rank, value in found.ranks.items():
        if found.bounds[rank] > value + slack:
            raise MethodError(
                f"corrections of rank {rank} reach J = {value:.6e}, less than their bound "
                f"{found.bounds[rank]:.6e}",
                "This is a bug of Isthmus: please report it, with the models if you can.",
            )
