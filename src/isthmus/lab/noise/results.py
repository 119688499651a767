"""What the pairs of a sweep say about merging and noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
from pydantic import BaseModel

from isthmus.lab.noise.curve import Curve, Optimum, optimum, smooth_curve
from isthmus.lab.noise.grids import PanelPlan
from isthmus.lab.sweeps.experiments import Experiment
from isthmus.lab.sweeps.run import RunRecord

KNOBS = ("noise_scale", "lr", "batch", "lr/batch", "effective_noise_scale", "distance")
"""What gains are drawn against. The last two are measured, not set."""

_REST = ("noise_scale", "seed")
"""Stands beside a point's figures, not among them."""
_FEWEST = 4
"""Points for a curve."""


@dataclass(frozen=True)
class Point:
    """The pairs of one setting, of several seeds.

    Attributes:
        settings: All but the seed.
        noise_scale: Of the settings.
        seeds: Pairs that did not diverge.
        diverged: Pairs that did.
        means: By name, figures of the pairs; none if all diverged.
        deviations: Over seeds; where there are two at least.
    """

    settings: Mapping[str, Any]
    noise_scale: float
    seeds: int
    diverged: int
    means: Mapping[str, float]
    deviations: Mapping[str, float]

    @property
    def steady(self) -> bool:
        """Whether no seed diverged: other settings are at the edge of what trains at all, and on no curve."""
        return self.seeds > 0 and self.diverged == 0

    def knob(self, name: str) -> float | None:
        """One of `KNOBS`; None where it was not measured."""
        if name == "noise_scale":
            return self.noise_scale
        if name == "lr/batch":
            return float(self.settings["lr"] / self.settings["batch"])
        found = self.settings.get(name, self.means.get(name))
        return None if found is None else float(found)


@dataclass(frozen=True)
class Panel:
    """The points of one network, one way of sharing.

    Attributes:
        name: For people.
        figure: The gain that is drawn, as the experiment calls it.
        points: In the order of their noise scale.
        curves: By knob, the merging gain as a function of that knob alone; none of knobs that do not vary.
        highest: Of the curve in the noise scale, if there is one.
    """

    name: str
    figure: str
    points: tuple[Point, ...]
    curves: Mapping[str, Curve]
    highest: Optimum | None

    @property
    def most_accurate(self) -> Point | None:
        """The steady setting whose merged model is best, whatever its parents are."""
        name = "merged_accuracy"
        if self.figure != "gain":
            name = self.figure.replace("_gain", "_accuracy")
        steady = [point for point in self.points if point.steady and name in point.means]
        return max(steady, key=lambda point: point.means[name], default=None)

    @property
    def ratios(self) -> dict[str, float]:
        """By knob, the spread around its curve relative to that around the curve in the noise scale."""
        if "noise_scale" not in self.curves:
            return {}
        own = self.curves["noise_scale"].spread
        return {name: curve.spread / own for name, curve in self.curves.items() if own > 0}


def panel(plan: PanelPlan, experiment: Experiment, records: Iterable[RunRecord]) -> Panel:
    """Gather the records of a panel's runs.

    Args:
        plan: Names the runs.
        experiment: Theirs.
        records: Of the sweep; others are left out.
    """
    model = experiment.model()
    by_settings = {model.model_validate(dict(record.settings)): record for record in records}
    groups: dict[BaseModel, list[RunRecord]] = {}
    for run in plan.runs:
        settings = model.model_validate(dict(run))
        record = by_settings.get(settings)
        if record is not None and record.status != "failed":
            groups.setdefault(settings.model_copy(update={"seed": 0}), []).append(record)
    points = sorted(
        (_point(settings, found) for settings, found in groups.items()),
        key=lambda point: point.noise_scale,
    )
    good = [point for point in points if point.steady]
    curves = {}
    for knob in KNOBS:
        places = [point.knob(knob) for point in good]
        varies = len(good) >= _FEWEST and len(set(places)) > 1
        if varies and all(place is not None and place > 0 for place in places):
            curves[knob] = smooth_curve(
                np.array(places), np.array([point.means[plan.figure] for point in good])
            )
    return Panel(
        plan.name,
        plan.figure,
        tuple(points),
        curves,
        optimum(curves["noise_scale"]) if "noise_scale" in curves else None,
    )


def _point(settings: Any, records: Sequence[RunRecord]) -> Point:
    done = [record.metrics for record in records if record.status == "done"]
    names = [
        name
        for name, value in (done[0].items() if done else ())
        if isinstance(value, int | float) and name not in _REST
    ]
    values = {name: [float(metrics[name]) for metrics in done] for name in names}
    return Point(
        settings.model_dump(mode="json", exclude={"seed"}),
        settings.noise_scale,
        len(done),
        len(records) - len(done),
        {name: fmean(found) for name, found in values.items()},
        {name: stdev(found) for name, found in values.items() if len(found) > 1},
    )
