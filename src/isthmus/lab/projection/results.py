"""What the experiments with encoders found out, by seed and in the mean, and its JSON form."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from isthmus.lab.candidates import Recipe
from isthmus.lab.evaluate import Accuracies, Row
from isthmus.lab.progress import Stage
from isthmus.lab.projection.correlation import spearman
from isthmus.lab.projection.settings import ProjectionSettings
from isthmus.lab.results_file import write_results
from isthmus.lab.suite import SuiteResults

ROUNDING = 1e-9
"""Share of J(0) by which a solution's J may exceed that of a point in its basis."""


REPORT = "projection.json"
"""What a calibrated merge says about its layers, in its output."""


@dataclass(frozen=True)
class Checks:
    """Whether the solution of each layer is at least as good as the points in its basis.

    Attributes:
        compared: How many points of how many layers there were.
        violations: Layer and point of those that have a smaller J: none, or something is wrong.
    """

    compared: int
    violations: tuple[str, ...]

    @classmethod
    def of(cls, report: Mapping[str, Any]) -> Checks:
        """Of what a merge wrote as ``projection.json``."""
        compared = 0
        violations = []
        for weight, layer in report["layers"].items():
            for point in layer.get("contained", ()):
                compared += 1
                if layer["value"] > layer["heuristics"][point] + ROUNDING * layer["initial"]:
                    violations.append(f"{weight}: {point}")
        return cls(compared, tuple(violations))


@dataclass(frozen=True)
class MergeDetail:
    """How one merge came about.

    Attributes:
        recipe: The recipe that was merged and tested.
        validation: By trial: mean normalised accuracy on validation; empty without a choice.
        at_edge: Whether tries ran out while the scale still grew or shrank.
        captured: Energy by the fixed objective: each layer on its inputs in the experts.
        by_layer: The same by layer.
        own: Energy by the objective that the merge itself minimised; None where it has none.
        checks: Of the solutions; None where there are none.
        notes: What the merge said about itself.
    """

    recipe: Recipe
    validation: dict[str, float]
    at_edge: bool
    captured: float
    by_layer: dict[str, float]
    own: float | None
    checks: Checks | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Merged:
    """One of the merges of the correlation.

    Attributes:
        name: What it is.
        group: Its kind.
        captured: Energy by the fixed objective, over all layers together.
        mean_captured: The mean over layers.
        output: Energy of the features on the calibration examples: the distance to each example's
            expert, as a share of the base's.
        accuracy: By task, on validation, where nothing is chosen among these merges.
        mean_normalised: Mean share of the experts' accuracies.
    """

    name: str
    group: str
    captured: float
    mean_captured: float
    output: float
    accuracy: Accuracies
    mean_normalised: float


@dataclass(frozen=True)
class SeedResults:
    """One seed.

    Attributes:
        seed: The seed.
        rows: The base, the experts, then one row per merge.
        details: By name of the merge's row.
        many: The merges of the correlation; empty where they were not asked for.
    """

    seed: int
    rows: tuple[Row, ...]
    details: Mapping[str, MergeDetail]
    many: tuple[Merged, ...] = ()


@dataclass(frozen=True)
class ProjectionResults(SuiteResults):
    """Everything that the table and the report show.

    Attributes:
        settings: What was asked for.
        classes: Class names, by task.
        seeds: Results by seed; all have the same rows.
        stages: Times, in order.
        environment: Versions and threads.
    """

    settings: ProjectionSettings
    classes: Mapping[str, tuple[str, ...]]
    seeds: tuple[SeedResults, ...]
    stages: tuple[Stage, ...]
    environment: Mapping[str, str]

    @property
    def many(self) -> tuple[Merged, ...]:
        """The merges of the correlation: of the first seed that has them."""
        return next((seed.many for seed in self.seeds if seed.many), ())

    def captured(self, name: str) -> float | None:
        """Energy by the fixed objective in the mean over seeds; None for what is no merge."""
        found = [seed.details[name].captured for seed in self.seeds if name in seed.details]
        return fmean(found) if found else None

    def own(self, name: str) -> float | None:
        """Energy by the merge's own objective in the mean over seeds; None where it has none."""
        found = [seed.details[name].own for seed in self.seeds if name in seed.details]
        known = [one for one in found if one is not None]
        return fmean(known) if known else None

    @property
    def checks(self) -> Checks:
        """Of all merges and seeds together."""
        found = [
            (f"{name}, seed {seed.seed}", detail.checks)
            for seed in self.seeds
            for name, detail in seed.details.items()
            if detail.checks is not None
        ]
        return Checks(
            sum(checks.compared for _, checks in found),
            tuple(f"{name}: {one}" for name, checks in found for one in checks.violations),
        )

    def correlations(self) -> dict[str, float]:
        """Spearman's correlation of each kind of energy with accuracy over the many merges."""
        return correlations(self.many)

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the means written out."""
        values = asdict(self)
        values["mean_over_seeds"] = [
            {
                "name": row.name,
                "kind": row.kind,
                "accuracy": row.accuracy,
                "normalised": row.normalised,
                "mean_accuracy": row.mean_accuracy,
                "mean_normalised": row.mean_normalised,
                "spread_of_mean_normalised": self.spread(row.name),
                "captured": self.captured(row.name),
                "own": self.own(row.name),
                "merge_seconds": row.merge_seconds,
            }
            for row in self.rows
        ]
        values["checks"] = asdict(self.checks)
        if self.many:
            values["spearman"] = self.correlations()
        values["seconds"] = self.seconds
        return values

    def write(self, path: Path) -> None:
        """Write the JSON form."""
        write_results(path, self.as_json(), indent=1)


def correlations(merges: Sequence[Merged]) -> dict[str, float]:
    """Spearman's correlation with mean normalised accuracy, by kind of energy."""
    accuracy = [merge.mean_normalised for merge in merges]
    return {
        "all layers together": spearman([merge.captured for merge in merges], accuracy),
        "mean over layers": spearman([merge.mean_captured for merge in merges], accuracy),
        "features": spearman([merge.output for merge in merges], accuracy),
    }


def read_report(folder: Path) -> dict[str, Any] | None:
    """What a merge says about its layers; None if it was not calibrated."""
    path = folder / REPORT
    if not path.is_file():
        return None
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report
