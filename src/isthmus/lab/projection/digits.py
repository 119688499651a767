"""One linear layer on MNIST: experts of disjoint digits, merged in every basis.

The layer is small enough for every programme to be solved exactly, so that this experiment shows the
theory without anything between: what is captured of the error on calibration pictures, how far the
merged outputs are from the experts' on test pictures, and how many of these are recognised.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from isthmus.lab.data.pictures import Pictures
from isthmus.lab.machine import environment, torch_threads
from isthmus.lab.progress import Narrator
from isthmus.lab.projection.digits_results import (
    DigitsResults,
    DigitsRow,
    DigitsRun,
    DigitsSettings,
)
from isthmus.lab.projection.tables import digits_grids, digits_remarks, tell
from isthmus.lab.tuning import Trial, tune
from isthmus.projection import heuristics, neighbours
from isthmus.projection.constraints import FREE, NON_NEGATIVE, Constraint, box
from isthmus.projection.layer import ProjectionRule, merge_layer
from isthmus.projection.objective import LayerObjective, expert_objective
from isthmus.projection.optimal import reduced_rank
from isthmus.projection.project import project
from isthmus.projection.quadratic import ProjectionWarning
from isthmus.projection.statistics import InputMoments, with_constant
from isthmus.projection.task_vector_bases import ColumnGroups, Elementwise, RowGroups

if TYPE_CHECKING:
    from isthmus.projection.basis import Basis

DENSITIES = (0.5, 0.2, 0.8)
"""Shares that TIES and DARE may keep, in the order in which they are tried."""

RIDGES = (1e-3, 1e-2, 1e-1, 1e-4, 1.0, 1e-5)
"""Shares of the mean curvature: as many as a heuristic has tries."""

ROUNDING = 1e-9
"""Of J(0): by so much the solution's J may exceed a point's."""


@dataclass(frozen=True)
class Labelled:
    """Inputs with a constant at the end, [N, 197], and their digits, [N]."""

    inputs: Tensor
    digits: Tensor

    def of(self, digits: Sequence[int]) -> Labelled:
        """Those of some digits."""
        chosen = torch.isin(self.digits, torch.tensor(digits))
        return Labelled(self.inputs[chosen], self.digits[chosen])

    def first(self, count: int) -> Labelled:
        """The first so many."""
        return Labelled(self.inputs[:count], self.digits[:count])


@dataclass(frozen=True)
class Layer:
    """Base and experts of one layer, and the pictures that merges are made with and judged by.

    Attributes:
        base: W_0, bias last, [10, 197].
        experts: W_k, [K, 10, 197].
        subsets: Digits by expert.
        calibration: Pictures by expert.
        validation: What scales and densities are chosen on.
        test: What is reported.
        seed: Of DARE's draws.
    """

    base: Tensor
    experts: Tensor
    subsets: tuple[tuple[int, ...], ...]
    calibration: tuple[Labelled, ...]
    validation: Labelled
    test: Labelled
    seed: int

    @cached_property
    def task_vectors(self) -> Tensor:
        """τ_k."""
        return self.experts - self.base

    @cached_property
    def moments(self) -> list[InputMoments]:
        """Of each expert's calibration pictures."""
        found = []
        for part in self.calibration:
            found.append(InputMoments.empty(part.inputs.shape[1]))
            found[-1].add(part.inputs)
        return found

    @cached_property
    def objective(self) -> LayerObjective:
        """J on the calibration pictures."""
        return expert_objective(self.task_vectors, self.moments)

    @cached_property
    def base_error(self) -> float:
        """The base's `error` on the test pictures."""
        return self.error(torch.zeros_like(self.base), self.test)

    def accuracy(self, correction: Tensor, part: Labelled) -> float:
        """Share of a part's pictures that the merged layer recognises."""
        predicted = (part.inputs @ (self.base + correction).mT).argmax(dim=1)
        return float((predicted == part.digits).double().mean())

    def accuracy_within(self, correction: Tensor, part: Labelled) -> float:
        """The same where it is known whose digits a picture may show."""
        outputs = part.inputs @ (self.base + correction).mT
        hits = 0
        for digits in self.subsets:
            own = torch.isin(part.digits, torch.tensor(digits))
            best = outputs[own][:, list(digits)].argmax(dim=1)
            hits += int((torch.tensor(digits)[best] == part.digits[own]).sum())
        return hits / len(part.digits)

    def error(self, correction: Tensor, part: Labelled) -> float:
        """Mean squared distance of the outputs from those of each picture's own expert."""
        total = 0.0
        for expert, digits in zip(self.experts, self.subsets, strict=True):
            own = part.of(digits)
            total += float((own.inputs @ (self.base + correction - expert).mT).square().sum())
        return total / len(part.inputs)


def run_digits(
    pictures: Pictures, settings: DigitsSettings, count: int, calibration: int, seed: int
) -> DigitsRun:
    """Train one base and its experts, merge them in every way, judge the merges.

    Args:
        pictures: Where MNIST is looked up.
        settings: Sizes and rates.
        count: How many experts share the ten digits.
        calibration: Calibration pictures of each expert.
        seed: Fixes the draws.
    """
    layer = make_layer(pictures, settings, count, calibration, seed)
    rows = [_row(layer, "base", torch.zeros_like(layer.base))]
    rows += [
        _row(layer, name, correction, setting)
        for name, (correction, setting) in _tuned(layer, settings.tries).items()
    ]
    rows.append(_row(layer, "soup", heuristics.soup(layer.task_vectors).correction))
    for name, merge in _NEIGHBOURS.items():
        rows.append(_row(layer, name, merge(layer.task_vectors, layer.moments)))
    rows += [
        _row(layer, name, correction, dimension=size)
        for name, correction, size in _bases(layer, settings.ranks)
    ]
    rows += [
        _row(layer, name, correction, setting)
        for name, (correction, setting) in _ridged(layer, settings.tries).items()
    ]
    many = [
        _row(layer, name, correction, dimension=size)
        for name, correction, size in _many_bases(layer)
    ]
    violations = _violations(layer)
    return DigitsRun(
        seed=seed,
        calibration=calibration,
        subsets=layer.subsets,
        experts=tuple(
            _accuracy_alone(layer, number, expert) for number, expert in enumerate(layer.experts)
        ),
        rows=tuple(rows),
        many=tuple(many),
        compared=len(violations),
        violations=tuple(name for name, broken in violations.items() if broken),
    )


def make_layer(
    pictures: Pictures, settings: DigitsSettings, count: int, calibration: int, seed: int
) -> Layer:
    """Draw pictures, train the base on few of all digits and the experts on more of their own."""
    generator = torch.Generator().manual_seed(seed)
    train = _labelled(pictures, "train", generator)
    test = _labelled(pictures, "test", generator).first(settings.test)
    base_part = train.first(settings.base)
    rest = Labelled(train.inputs[settings.base :], train.digits[settings.base :])
    validation = rest.first(settings.validation)
    rest = Labelled(rest.inputs[settings.validation :], rest.digits[settings.validation :])
    subsets = tuple(tuple(part.tolist()) for part in torch.arange(10).tensor_split(count))
    own = [rest.of(digits).first(settings.train) for digits in subsets]
    base = trained(torch.zeros(10, train.inputs.shape[1]), base_part, settings, generator)
    return Layer(
        base.double(),
        torch.stack([trained(base, part, settings, generator) for part in own]).double(),
        subsets,
        tuple(_double(part.first(calibration)) for part in own),
        _double(validation),
        _double(test),
        seed,
    )


def trained(
    start: Tensor, part: Labelled, settings: DigitsSettings, generator: torch.Generator
) -> Tensor:
    """A copy of a layer, fine-tuned by AdamW on the cross-entropy over all ten digits."""
    weight = nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([weight], lr=settings.learning_rate, weight_decay=0.0)
    for _ in range(settings.epochs):
        order = torch.randperm(len(part.digits), generator=generator)
        for first in range(0, len(order), settings.batch):
            batch = order[first : first + settings.batch]
            loss = nn.functional.cross_entropy(part.inputs[batch] @ weight.mT, part.digits[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return weight.detach()


def _labelled(pictures: Pictures, part: str, generator: torch.Generator) -> Labelled:
    """All pictures of a file in random order, of 14 x 14 pixels from 0 to 1."""
    images = torch.tensor(pictures.array("mnist", part, "images")).float()
    images = nn.functional.avg_pool2d(images, 2).flatten(1)
    digits = torch.tensor(pictures.array("mnist", part, "labels")).long()
    order = torch.randperm(len(images), generator=generator)
    return Labelled(with_constant(images[order] / 255), digits[order])


def _double(part: Labelled) -> Labelled:
    return Labelled(part.inputs.double(), part.digits)


def _accuracy_alone(layer: Layer, number: int, expert: Tensor) -> float:
    """Of an expert on its own digits."""
    return layer.accuracy(expert - layer.base, layer.test.of(layer.subsets[number]))


def _row(
    layer: Layer, name: str, correction: Tensor, setting: str = "", dimension: int | None = None
) -> DigitsRow:
    return DigitsRow(
        name=name,
        captured=1 - max(layer.objective.value(correction), 0.0) / layer.objective.initial,
        held_out=1 - layer.error(correction, layer.test) / layer.base_error,
        mse=layer.error(correction, layer.test),
        within=layer.accuracy_within(correction, layer.test),
        accuracy=layer.accuracy(correction, layer.test),
        setting=setting,
        dimension=dimension,
    )


def _tuned(layer: Layer, tries: int) -> dict[str, tuple[Tensor, str]]:
    """The heuristics, with the scale and density that recognise most validation pictures."""
    tau = layer.task_vectors
    seeds = [layer.seed * 1000 + number for number in range(len(tau))]

    def dare(trial: Trial) -> Tensor:
        density = 1.0 if trial.density is None else trial.density
        return heuristics.dare(tau, seeds, density=density, weights=trial.scale).correction

    def ties(trial: Trial) -> Tensor:
        density = 1.0 if trial.density is None else trial.density
        return heuristics.ties(tau, density=density, scale=trial.scale).correction

    def task_arithmetic(trial: Trial) -> Tensor:
        return heuristics.task_arithmetic(tau, trial.scale).correction

    found: dict[str, tuple[Tensor, str]] = {"task arithmetic, λ=1": (task_arithmetic(Trial()), "")}
    contests: tuple[tuple[str, Callable[[Trial], Tensor], tuple[float, ...]], ...] = (
        ("task arithmetic", task_arithmetic, ()),
        ("TIES", ties, DENSITIES),
        ("DARE", dare, DENSITIES),
    )
    for name, merge, densities in contests:

        def score(trial: Trial, merge: Callable[[Trial], Tensor] = merge) -> float:
            return layer.accuracy(merge(trial), layer.validation)

        best = tune(score, tries=tries, densities=densities).best
        found[name] = (merge(best), str(best))
    return found


_NEIGHBOURS: Mapping[str, Callable[[Tensor, Sequence[InputMoments]], Tensor]] = {
    "Fisher, diagonal": neighbours.diagonal_fisher,
    "Fisher, Kronecker": neighbours.kronecker_fisher,
    "RegMean, keep 0.9": partial(neighbours.regmean, keep=0.9),
}


def _bases(layer: Layer, ranks: Sequence[int]) -> list[tuple[str, Tensor, int]]:
    """Projections of the table: name, correction, number of coefficients."""
    tau = layer.task_vectors
    found = [
        _projected(layer, name, basis, constraint)
        for name, basis, constraint in (
            ("QP scalar", RowGroups.scalar(tau), FREE),
            ("QP diagonal", RowGroups.diagonal(tau), FREE),
            ("QP columns", ColumnGroups.diagonal(tau), FREE),
            ("QP elementwise, box", Elementwise(tau), box()),
        )
    ]
    for rank in ranks:
        best = reduced_rank(layer.objective, rank).correction
        found.append((f"QP optimal, rank {rank}", best, rank * sum(tau.shape[1:]) - rank * rank))
    found.append(("QP optimal, all weights", layer.objective.regression(), tau[0].numel()))
    return found


def _ridged(layer: Layer, tries: int) -> dict[str, tuple[Tensor, str]]:
    """Large bases with the ridge that recognises most validation pictures."""
    tau = layer.task_vectors
    rules = {
        "QP columns, ridge": partial(ProjectionRule, "columns"),
        "QP optimal, ridge": partial(ProjectionRule, "optimal"),
    }
    found = {}
    for name, rule in rules.items():
        scored = []
        for ridge in RIDGES[:tries]:
            correction = merge_layer(
                rule(ridge=ridge),
                tau,
                layer.objective,
                layer.moments,
                [1.0] * len(tau),
                range(len(tau)),
            ).correction
            scored.append((layer.accuracy(correction, layer.validation), -ridge, correction))
        _, ridge, correction = max(scored, key=lambda one: one[:2])
        found[name] = (correction, f"ridge {-ridge:g}")
    return found


def _many_bases(layer: Layer) -> list[tuple[str, Tensor, int]]:
    """Projections of the correlation: groups of rows and columns of all sizes, ranks, constraints."""
    tau = layer.task_vectors
    rows, columns = tau.shape[1:]
    found: list[tuple[str, Tensor, int]] = []
    for constraint, word in ((FREE, "free"), (NON_NEGATIVE, "non-negative"), (box(), "box")):
        for size in (10, 5, 2, 1):
            groups = torch.arange(rows) // size
            name = f"rows by {size}, {word}"
            found.append(_projected(layer, name, RowGroups(tau, groups), constraint))
        for size in (98, 56, 28, 14, 7):
            # A picture's row has 14 pixels; the bias has a group of its own.
            groups = torch.arange(columns) // size
            groups[-1] = int(groups[-2]) + 1
            name = f"columns by {size}, {word}"
            found.append(_projected(layer, name, ColumnGroups(tau, groups), constraint))
    for rank in range(1, rows):
        best = reduced_rank(layer.objective, rank).correction
        found.append((f"rank {rank}", best, rank * (rows + columns - rank)))
    return found


def _projected(
    layer: Layer, name: str, basis: Basis, constraint: Constraint
) -> tuple[str, Tensor, int]:
    with warnings.catch_warnings():
        # Pixels at the edge are never lit: what they leave open is of no consequence.
        warnings.simplefilter("ignore", ProjectionWarning)
        found = project(basis, layer.objective, constraint)
    return name, found.correction, basis.dimension


def _violations(layer: Layer) -> dict[str, bool]:
    """For every basis and every point in it: whether the point's J is smaller than the solution's."""
    tau = layer.task_vectors
    seeds = range(len(tau))
    arithmetic = [heuristics.task_arithmetic(tau, scale) for scale in (0.25, 0.5, 1.0)]
    means = [heuristics.soup(tau)]
    sparse = [heuristics.ties(tau, density=density) for density in DENSITIES]
    rescaled = [heuristics.dare(tau, [*seeds], density=density) for density in DENSITIES]
    compared: tuple[tuple[str, Basis, Constraint, list[heuristics.Heuristic]], ...] = (
        ("scalar", RowGroups.scalar(tau), FREE, arithmetic + means),
        ("diagonal", RowGroups.diagonal(tau), FREE, arithmetic + means),
        ("columns", ColumnGroups.diagonal(tau), FREE, arithmetic + means),
        ("elementwise, box", Elementwise(tau), box(), arithmetic + means + sparse),
        ("elementwise, box of 5", Elementwise(tau), box(0, 5), sparse + rescaled),
    )
    allowed = ROUNDING * layer.objective.initial
    found = {}
    for name, basis, constraint, points in compared:
        _, correction, _ = _projected(layer, name, basis, constraint)
        least = layer.objective.value(correction)
        for number, point in enumerate(points):
            worse = least > layer.objective.value(point.correction) + allowed
            found[f"{name}: {point.name} {number}"] = worse
    return found


def run_all_digits(
    output: Path,
    *,
    cache: Path = Path(".cache"),
    settings: DigitsSettings | None = None,
    narrator: Narrator | None = None,
) -> DigitsResults:
    """Every number of experts, size of calibration and seed; writes ``results.json``.

    Args:
        output: Folder to write to; made if it is missing.
        cache: Where ``make data`` put its data.
        settings: Sizes and seeds.
        narrator: Shows the progress; on standard output by default.

    Raises:
        IsthmusError: ``make data`` was not run.
    """
    settings = DigitsSettings() if settings is None else settings
    narrator = Narrator() if narrator is None else narrator
    output.mkdir(parents=True, exist_ok=True)
    pictures = Pictures(cache / "data")
    runs: list[DigitsRun] = []
    # The matrices are small: threads would wait for each other more than they compute.
    with torch_threads(1):
        for count in settings.experts:
            for calibration in settings.calibration:
                with narrator.stage(
                    f"{count} experts, {calibration} calibration pictures each", len(settings.seeds)
                ) as advance:
                    for seed in settings.seeds:
                        runs.append(run_digits(pictures, settings, count, calibration, seed))
                        advance(1)
        results = DigitsResults(settings, tuple(runs), tuple(narrator.stages), environment(1))
    results.write(output / "results.json")
    tell(digits_grids(results), digits_remarks(results), narrator)
    return results
