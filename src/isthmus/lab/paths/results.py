"""What the experiments with paths found out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from isthmus.lab.progress import Stage
from isthmus.lab.results_file import write_results


@dataclass(frozen=True)
class Joined:
    """Two networks, or several, and a path between them.

    Attributes:
        group: What the pairs of one line of the table have in common, such as the width.
        alignment: How the second network was moved: ``none``, ``weights``, ``activations``, ``learned``.
        path: Which path: ``linear``, ``linear, reset``, ``one bend``.
        pair: Which networks.
        figures: By name; barriers are of kind (b).
        ts: The grid, where there is one.
        curves: By name, a figure for every t.
    """

    group: str
    alignment: str
    path: str
    pair: str
    figures: Mapping[str, float]
    ts: tuple[float, ...] = ()
    curves: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """A line of the table: means over pairs, and standard deviations where there are several."""

    group: str
    alignment: str
    path: str
    pairs: int
    means: Mapping[str, float]
    spreads: Mapping[str, float]


@dataclass(frozen=True)
class PathResults:
    """One experiment.

    Attributes:
        experiment: Its name.
        settings: Everything that it depends on, as JSON values.
        figures: Those that the table shows, with their headings.
        joined: Every pair on every path.
        stages: What took how long.
        environment: Versions and threads.
    """

    experiment: str
    settings: Mapping[str, Any]
    figures: Mapping[str, str]
    joined: tuple[Joined, ...]
    stages: tuple[Stage, ...]
    environment: Mapping[str, str]

    @property
    def lines(self) -> tuple[Line, ...]:
        """The table, in the order in which lines first appear."""
        groups: dict[tuple[str, str, str], list[Joined]] = {}
        for one in self.joined:
            groups.setdefault((one.group, one.alignment, one.path), []).append(one)
        lines = []
        for (group, alignment, path), same in groups.items():
            values = {
                name: [one.figures[name] for one in same]
                for name in self.figures
                if all(name in one.figures for one in same)
            }
            lines.append(
                Line(
                    group,
                    alignment,
                    path,
                    len(same),
                    {name: fmean(found) for name, found in values.items()},
                    {name: stdev(found) for name, found in values.items() if len(found) > 1},
                )
            )
        return tuple(lines)

    def write(self, path: Path) -> None:
        """As JSON."""
        write_results(
            path,
            {
                "experiment": self.experiment,
                "settings": self.settings,
                "environment": self.environment,
                "seconds": round(sum(stage.seconds for stage in self.stages), 1),
                "stages": [asdict(stage) for stage in self.stages],
                "lines": [asdict(line) for line in self.lines],
                "joined": [asdict(one) for one in self.joined],
            },
            indent=1,
        )
