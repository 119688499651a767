"""What the experiment with digits is asked, and what it finds out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from isthmus.lab.progress import Stage
from isthmus.lab.projection.correlation import spearman
from isthmus.lab.results_file import write_results

FAMILIES = ("rows", "columns", "rank")
"""Kinds of bases, by the first word of their names."""


@dataclass(frozen=True)
class DigitsSettings:
    """Everything that decides the numbers.

    Attributes:
        experts: How many experts share the ten digits, one experiment each.
        seeds: Each fixes the draw of the pictures and the order of training.
        base: Pictures of all digits that the base learns from.
        train: Pictures of its own digits that an expert learns from.
        calibration: How many of these it is calibrated on, one experiment each.
        validation: Pictures of all digits that scales and densities are chosen on.
        test: Pictures that are reported on.
        epochs: Passes over the training part.
        batch: Pictures per step.
        learning_rate: Of AdamW.
        tries: Settings that a heuristic may look at.
        ranks: Of the optimal corrections in the table.
    """

    experts: tuple[int, ...] = (2, 3, 4, 5)
    seeds: tuple[int, ...] = (0, 1, 2)
    base: int = 500
    train: int = 2000
    calibration: tuple[int, ...] = (128, 1000)
    validation: int = 1000
    test: int = 10_000
    epochs: int = 5
    batch: int = 50
    learning_rate: float = 3e-3
    tries: int = 6
    ranks: tuple[int, ...] = (1, 2, 4, 8)


@dataclass(frozen=True)
class DigitsRow:
    """One merge.

    Attributes:
        name: Of the merge.
        captured: Share of the base's error on the calibration pictures that it removes.
        held_out: The same of the error on test pictures.
        mse: Mean squared distance from the experts' outputs, on test pictures.
        accuracy: Share of the test pictures that are recognised, all ten digits being possible.
        within: The same where it is known whose digits a picture may show.
        setting: What validation chose; empty without a choice.
        dimension: Number of coefficients; None where there are none.
    """

    name: str
    captured: float
    held_out: float
    mse: float
    within: float
    accuracy: float
    setting: str = ""
    dimension: int | None = None


@dataclass(frozen=True)
class DigitsRun:
    """One number of experts, one size of calibration and one seed.

    Attributes:
        seed: The seed.
        calibration: Calibration pictures of each expert.
        subsets: Digits by expert.
        experts: Accuracy of each expert on its own digits.
        rows: The merges of the table.
        many: Projections in many bases.
        compared: How many points were compared with the solution of a basis that holds them.
        violations: Which of them have a smaller J: none, or something is wrong.
    """

    seed: int
    calibration: int
    subsets: tuple[tuple[int, ...], ...]
    experts: tuple[float, ...]
    rows: tuple[DigitsRow, ...]
    many: tuple[DigitsRow, ...]
    compared: int
    violations: tuple[str, ...]


@dataclass(frozen=True)
class DigitsResults:
    """All runs.

    Attributes:
        settings: What was asked for.
        runs: In the order of `settings`: numbers of experts, then seeds.
        stages: Times, in order.
        environment: Versions and threads.
    """

    settings: DigitsSettings
    runs: tuple[DigitsRun, ...]
    stages: tuple[Stage, ...]
    environment: Mapping[str, str]

    def of(self, experts: int, calibration: int) -> tuple[DigitsRun, ...]:
        """The runs of one experiment, one a seed."""
        return tuple(
            run
            for run in self.runs
            if len(run.subsets) == experts and run.calibration == calibration
        )

    def mean(self, experts: int, calibration: int) -> tuple[DigitsRow, ...]:
        """The rows in the mean over seeds."""
        return tuple(
            DigitsRow(
                name=same[0].name,
                captured=fmean(row.captured for row in same),
                held_out=fmean(row.held_out for row in same),
                mse=fmean(row.mse for row in same),
                accuracy=fmean(row.accuracy for row in same),
                within=fmean(row.within for row in same),
                setting=", ".join(dict.fromkeys(row.setting for row in same if row.setting)),
                dimension=same[0].dimension,
            )
            for same in zip(*(run.rows for run in self.of(experts, calibration)), strict=True)
        )

    def spread(self, experts: int, calibration: int, name: str) -> float | None:
        """Standard deviation over seeds of a row's accuracy; None for one seed."""
        values = [
            row.accuracy
            for run in self.of(experts, calibration)
            for row in run.rows
            if row.name == name
        ]
        return stdev(values) if len(values) > 1 else None

    def correlation(
        self, experts: int, calibration: int, energy: str, accuracy: str, family: str = ""
    ) -> float:
        """Spearman's correlation over the many bases, in the mean over seeds.

        Args:
            experts: Which experiment.
            calibration: Which experiment.
            energy: ``captured`` or ``held_out``.
            accuracy: ``accuracy`` or ``within``.
            family: One of `FAMILIES`, or nothing for all.
        """
        found = []
        for run in self.of(experts, calibration):
            some = [row for row in run.many if row.name.startswith(family)]
            found.append(
                spearman(
                    [getattr(row, energy) for row in some], [getattr(row, accuracy) for row in some]
                )
            )
        return fmean(found)

    def write(self, path: Path) -> None:
        """Write the JSON form."""
        write_results(path, self.as_json(), indent=1)

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the means written out."""
        values = asdict(self)
        values["mean_over_seeds"] = [
            {
                "experts": count,
                "calibration": calibration,
                "rows": [
                    {
                        **asdict(row),
                        "spread_of_accuracy": self.spread(count, calibration, row.name),
                    }
                    for row in self.mean(count, calibration)
                ],
                "spearman": {
                    f"{family or 'all'}: {energy}, {accuracy}": self.correlation(
                        count, calibration, energy, accuracy, family
                    )
                    for family in ("", *FAMILIES)
                    for energy in ("captured", "held_out")
                    for accuracy in ("accuracy", "within")
                },
            }
            for count in self.settings.experts
            for calibration in self.settings.calibration
        ]
        return values
