"""The report of `isthmus lab noise`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from isthmus.lab.noise.results import Panel
from isthmus.lab.noise.run import NoiseResults
from isthmus.lab.noise.tables import point_grid, remarks
from isthmus.reports.html_figures import COLOURS, MARKERS, drawn, plain
from isthmus.reports.lab_page import Page, file_name, markup

_WHAT = {
    "noise-pair": "Pairs of networks that differ in the order of their data only, merged by their mean.",
    "noise-transfer": "Two fine-tunes of a network that was pretrained on other pictures, merged by three methods.",
    "noise-text-transfer": "Fine-tunes of MiniLM on tasks of text, merged by three methods.",
}
_DRAWN = {"lr": "learning rate", "batch": "batch size", "noise_scale": "noise scale"}
_BARRIERS = {"barrier": "as trained", "rebasin_barrier": "weights matched"}
_MEASURED = {
    "effective_noise_scale": "effective noise scale, measured",
    "distance": "distance of the parents",
}


def noise_page(results: NoiseResults) -> Page:
    """Tables, sentences, and for every panel the gain against each knob and against the noise scale."""
    return Page(
        title="When models merge: the noise of their training",
        intro=f"{_WHAT[results.experiment]} The merging gain is the merged model's accuracy minus the mean of its "
        "parents'; colours are batch sizes, bars are standard deviations over seeds, lines the smooth curve in "
        "that knob alone. Settings of which a seed diverged are in the tables only.",
        grids=[*results.grids, *map(point_grid, _tables(results.panels))],
        remarks=[*remarks(results.panels)],
        figures=[*map(markup, noise_figures(results).values())],
        environment=results.environment,
    )


def noise_figures(results: NoiseResults) -> dict[str, str]:
    """All figures of the report, each an ``<svg>`` element, by a name that serves for a file."""
    found = {}
    for panel in results.panels:
        name = file_name(panel.name)
        found[name] = gain_figure(panel)
        if (likeness := likeness_figure(panel)) is not None:
            found[f"{name}-likeness"] = likeness
    return found


def _tables(panels: Sequence[Panel]) -> list[Panel]:
    """Panels without those that draw another figure of the same points."""
    return [
        one
        for one, last in zip(panels, (None, *panels), strict=False)
        if not last or one.points != last.points
    ]


def gain_figure(panel: Panel) -> str:
    """Draw the merging gain against learning rate, batch size, noise scale, and what was measured.

    Returns:
        An ``<svg>`` element, the same text for the same numbers.
    """
    knobs = _DRAWN | {
        name: label
        for name, label in _MEASURED.items()
        if any(name in point.means for point in panel.points)
    }

    def draw(figure: Any) -> None:
        figure.suptitle(plain(panel.name))
        axes = figure.subplots(1, len(knobs), sharey=True, squeeze=False)[0]
        for place, (knob, label) in zip(axes, knobs.items(), strict=True):
            _scatter(place, panel, knob)
            place.set_xscale("log")
            # Gains of a point and losses of twenty, both to be seen.
            place.set_yscale("symlog", linthresh=1)
            place.yaxis.set_major_formatter("{x:g}")
            place.set_xlabel(label)
            if knob == "batch":
                batches = sorted({point.settings["batch"] for point in panel.points})
                place.set_xticks(batches, [str(batch) for batch in batches])
                place.set_xticks([], minor=True)
            place.axhline(0, color="black", linewidth=0.6)
            place.grid(linewidth=0.4)
        axes[0].set_ylabel("merging gain, points")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)

    return drawn(draw, (3.2 * len(knobs), 3.8))


def likeness_figure(panel: Panel) -> str | None:
    """Draw barriers before and after matching against the noise scale, and the gain against the likeness of features.

    Returns:
        An ``<svg>`` element, or None where features were not compared.
    """
    points = [point for point in panel.points if point.steady and "cka" in point.means]
    if not points:
        return None

    def draw(figure: Any) -> None:
        figure.suptitle(plain(panel.name))
        left, right = figure.subplots(1, 2)
        scales = [point.noise_scale for point in points]
        for number, (name, label) in enumerate(_BARRIERS.items()):
            if all(name in point.means for point in points):
                left.plot(
                    scales,
                    [point.means[name] for point in points],
                    linestyle="none",
                    marker=MARKERS[number],
                    color=COLOURS[number],
                    markerfacecolor="none" if number else COLOURS[number],
                    markersize=4 + 2 * number,
                    label=label,
                )
        left.set_xscale("log")
        left.set_yscale("symlog", linthresh=0.01)
        left.set_ylim(bottom=-0.002)
        left.set_xlabel("noise scale")
        left.set_ylabel("barrier of the loss")
        left.legend(frameon=False)
        right.plot(
            [point.means["cka"] for point in points],
            [100 * point.means[panel.figure] for point in points],
            linestyle="none",
            marker=MARKERS[0],
            color=COLOURS[0],
            markersize=4,
        )
        right.set_yscale("symlog", linthresh=1)
        right.yaxis.set_major_formatter("{x:g}")
        right.axhline(0, color="black", linewidth=0.6)
        right.set_xlabel("linear CKA of the parents' features")
        right.set_ylabel("merging gain, points")
        for place in (left, right):
            place.grid(linewidth=0.4)

    return drawn(draw, (7.6, 3.4))


def _scatter(place: Any, panel: Panel, knob: str) -> None:
    points = [point for point in panel.points if point.steady and (point.knob(knob) or 0) > 0]
    batches: Sequence[int] = sorted({point.settings["batch"] for point in points})
    for number, batch in enumerate(batches):
        some = [point for point in points if point.settings["batch"] == batch]
        place.errorbar(
            [point.knob(knob) for point in some],
            [100 * point.means[panel.figure] for point in some],
            yerr=[100 * point.deviations.get(panel.figure, 0.0) for point in some],
            linestyle="none",
            marker=MARKERS[number % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)],
            elinewidth=0.6,
            markersize=4,
            label=f"batch {batch}",
        )
    if (curve := panel.curves.get(knob)) is not None and len(set(curve.x)) > len(batches):
        places = np.geomspace(curve.x.min(), curve.x.max(), 100)
        place.plot(places, 100 * curve.at(places), color="grey", linewidth=1)
