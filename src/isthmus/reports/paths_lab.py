"""The report of `isthmus lab paths`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from isthmus.lab.paths.results import Joined, Line, PathResults
from isthmus.lab.paths.tables import grid_of
from isthmus.reports.html_figures import COLOURS, MARKERS, drawn, plain
from isthmus.reports.lab_page import Page, file_name, markup

_WIDTH = re.compile(r"width (\d+)")
_LOWEST = 1e-4
"""Barriers below it are drawn on it: a logarithm has no place for 0."""


def paths_page(results: PathResults) -> Page:
    """The table, figures over the width where networks differ in it, and figures along the paths."""
    return Page(
        title=f"Paths between networks: {results.experiment}",
        intro="Networks of several seeds, aligned in several ways and joined by paths. Barriers are of kind (b), "
        "the largest rise of the loss above the line between the ends; curves are means over pairs.",
        grids=[grid_of(results)],
        remarks=[],
        figures=[*map(markup, paths_figures(results).values())],
        environment=results.environment,
    )


def paths_figures(results: PathResults) -> dict[str, str]:
    """All figures of the report, each an ``<svg>`` element, by a name that serves for a file."""
    found = {}
    for name in results.figures:
        if (over_width := width_figure(results, name)) is not None:
            found[f"{name}-over-width"] = over_width
    for name in {name: None for joined in results.joined for name in joined.curves}:
        found[name] = curve_figure(results, name)
    return {file_name(name): figure for name, figure in found.items()}


def width_figure(results: PathResults, name: str) -> str | None:
    """Draw a figure of the table against the width, a line for each alignment and path.

    Args:
        results: Of the experiment.
        name: Of the figure.

    Returns:
        An ``<svg>`` element; None where groups are not widths, or fewer than two have the figure.
    """
    lines = [line for line in results.lines if name in line.means]
    widths = {line.group: match for line in lines if (match := _WIDTH.fullmatch(line.group))}
    if len(widths) < 2 or len(widths) != len({line.group for line in lines}):
        return None
    kinds = list(dict.fromkeys(_kind(line) for line in lines))
    barrier = "barrier" in name

    def draw(figure: Any) -> None:
        place = figure.subplots()
        for number, kind in enumerate(kinds):
            own = [line for line in lines if _kind(line) == kind]
            values = [line.means[name] for line in own]
            place.errorbar(
                [int(widths[line.group][1]) for line in own],
                [max(value, _LOWEST) for value in values] if barrier else values,
                yerr=[line.spreads.get(name, 0.0) for line in own],
                elinewidth=0.6,
                **_style(number, kind),
            )
        place.set_xscale("log", base=2)
        if barrier:
            place.set_yscale("log")
            place.set_ylim(bottom=_LOWEST)
        place.xaxis.set_major_formatter("{x:g}")
        place.set_xlabel("width")
        place.set_ylabel(plain(results.figures[name]))
        place.grid(linewidth=0.4)
        figure.legend(loc="outside right upper", frameon=False)

    return drawn(draw, (7.2, 3.6))


def curve_figure(results: PathResults, name: str) -> str:
    """Draw a figure along the paths, means over pairs: a panel for each group, a line for each alignment and path.

    Args:
        results: Of the experiment.
        name: Of the curve.

    Returns:
        An ``<svg>`` element.
    """
    joined = [one for one in results.joined if name in one.curves]
    groups = list(dict.fromkeys(one.group for one in joined))
    kinds = list(dict.fromkeys(_kind(one) for one in joined))

    def draw(figure: Any) -> None:
        figure.suptitle(plain(name))
        panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
        for place, group in zip(panels, groups, strict=True):
            for number, kind in enumerate(kinds):
                same = [one for one in joined if (one.group, _kind(one)) == (group, kind)]
                if same:
                    place.plot(same[0].ts, _means(same, name), **_style(number, kind))
            place.set_title(plain(group), fontsize="medium")
            place.set_xlabel("t")
            place.grid(linewidth=0.4)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)

    return drawn(draw, (max(4.8, 2.4 * len(groups)), 3.6))


def _kind(one: Joined | Line) -> str:
    aligned = "not aligned" if one.alignment == "none" else one.alignment
    return f"{aligned}, {one.path}"


def _means(joined: Sequence[Joined], name: str) -> list[float]:
    return [fmean(values) for values in zip(*(one.curves[name] for one in joined), strict=True)]


def _style(number: int, label: str) -> dict[str, Any]:
    return {
        "marker": MARKERS[number % len(MARKERS)],
        "color": COLOURS[number % len(COLOURS)],
        "markersize": 3,
        "linewidth": 1,
        "label": plain(label),
    }
