"""What the adapter suite found out, by seed and in the mean, and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.lab.adapters_settings import AdapterSettings
from isthmus.lab.candidates import Recipe
from isthmus.lab.evaluate import Row
from isthmus.lab.progress import Stage
from isthmus.lab.results_file import write_results
from isthmus.lab.suite import SuiteResults

if TYPE_CHECKING:
    from isthmus.lab.adapters_distance import Likeness


@dataclass(frozen=True)
class MergeDetail:
    """How one merge came about.

    Attributes:
        rank: The largest rank of the merged adapter's modules.
        recipe: The recipe that was merged and tested.
        validation: By trial: mean normalised accuracy on validation; empty without a choice.
        at_edge: Whether tries ran out while the scale still grew or shrank.
        notes: What the merge said about itself.
    """

    rank: int
    recipe: Recipe
    validation: dict[str, float]
    at_edge: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class SeedResults:
    """One seed.

    Attributes:
        seed: The seed.
        rows: The base, the single adapters, then one row per merge.
        details: By name of the merge's row.
        likeness: What the adapters had in common.
    """

    seed: int
    rows: tuple[Row, ...]
    details: Mapping[str, MergeDetail]
    likeness: Likeness


@dataclass(frozen=True)
class AdapterResults(SuiteResults):
    """Everything that the table and the report show.

    Attributes:
        settings: What was asked for.
        classes: Class names, by task.
        seeds: Results by seed; all have the same rows.
        stages: Times, in order.
        environment: Versions and threads.
    """

    settings: AdapterSettings
    classes: Mapping[str, tuple[str, ...]]
    seeds: tuple[SeedResults, ...]
    stages: tuple[Stage, ...]
    environment: Mapping[str, str]

    def rank(self, name: str) -> int | None:
        """The rank of a row's adapter; None for the base."""
        first = self.seeds[0]
        if name in first.details:
            return first.details[name].rank
        kind = next(row.kind for row in first.rows if row.name == name)
        return self.settings.lora.rank if kind == "expert" else None

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the means written out."""
        values = asdict(self)
        values["mean_over_seeds"] = [
            {
                "name": row.name,
                "kind": row.kind,
                "rank": self.rank(row.name),
                "accuracy": row.accuracy,
                "normalised": row.normalised,
                "mean_accuracy": row.mean_accuracy,
                "mean_normalised": row.mean_normalised,
                "spread_of_mean_normalised": self.spread(row.name),
                "merge_seconds": row.merge_seconds,
            }
            for row in self.rows
        ]
        for seed, written in zip(self.seeds, values["seeds"], strict=True):
            for row, plain in zip(seed.rows, written["rows"], strict=True):
                plain["mean_accuracy"] = row.mean_accuracy
                plain["mean_normalised"] = row.mean_normalised
        values["seconds"] = self.seconds
        return values

    def write(self, path: Path) -> None:
        """Write the JSON form."""
        write_results(path, self.as_json())
