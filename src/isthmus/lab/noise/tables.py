"""What the pairs showed, as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from scipy.stats import spearmanr

from isthmus.lab.grid import Grid
from isthmus.lab.noise.results import Panel, Point

_SPREADS = {
    "noise_scale": "noise scale",
    "lr": "learning rate",
    "batch": "batch",
    "lr/batch": "rate/batch",
    "effective_noise_scale": "effective",
    "distance": "distance",
}
BARRIER = 0.02
"""In loss; below it there is nothing for a matching to mend."""

_FEWEST = 4
"""Points for a rank correlation."""

SURE = 0.95
"""The share of resampled curves that must be higher at the optimum than at either end for it to be called one."""


def collapse_grid(panels: Sequence[Panel]) -> Grid:
    """By panel, how far gains scatter around a curve in each knob alone, in points of accuracy."""
    rows = []
    for panel in panels:
        cells = [
            f"{100 * panel.curves[knob].spread:.2f}" if knob in panel.curves else ""
            for knob in _SPREADS
        ]
        diverged = sum(point.diverged for point in panel.points)
        rows.append((panel.name, str(len(panel.points)), str(diverged), *cells))
    return Grid(
        "How far merging gains lie from a smooth curve in one knob, in points of accuracy",
        ("networks", "settings", "diverged", *_SPREADS.values()),
        tuple(rows),
    )


def optimum_grid(panels: Sequence[Panel]) -> Grid:
    """By panel, where the curve in the noise scale is highest."""
    rows = []
    for panel in panels:
        if (found := panel.highest) is None:
            continue
        low, high = found.interval
        rows.append(
            (
                panel.name,
                f"{found.at:.1e}",
                f"{low:.0e} to {high:.0e}",
                f"{100 * found.height:+.2f}",
                f"{100 * (found.height - found.rise):+.2f}",
                f"{100 * (found.height - found.fall):+.2f}",
                f"{100 * found.interior:.0f}",
                "" if panel.most_accurate is None else f"{panel.most_accurate.noise_scale:.1e}",
            )
        )
    return Grid(
        "Where the merging gain is highest; gains in points of accuracy over the parents' mean",
        (
            "networks",
            "noise scale",
            "95 %",
            "gain",
            "at the least noise",
            "at the most",
            "interior, %",
            "merged model best at",
        ),
        tuple(rows),
    )


def similarity_grid(panels: Sequence[Panel]) -> Grid:
    """By panel, what goes with the gain over settings, and what matching the weights does to barriers."""
    rows = []
    for panel in panels:
        points = [point for point in panel.points if point.steady and "cka" in point.means]
        if len(points) < _FEWEST:
            continue
        gains = [point.means[panel.figure] for point in points]
        correlations = [
            _correlation(gains, [value(point) for point in points])
            for value in (_cka, _distance, _noise)
        ]
        high = [
            point.means
            for point in points
            if "rebasin_barrier" in point.means and point.means["barrier"] > BARRIER
        ]
        barriers = [
            f"{median(means[name] for means in high):.3f}" if high else ""
            for name in ("barrier", "rebasin_barrier")
        ]
        rows.append((panel.name, *correlations, str(len(high) or ""), *barriers))
    return Grid(
        "Rank correlation of the gain over settings with the likeness of features (linear CKA), the parents' "
        f"distance and the noise scale; barriers above {BARRIER} and what matching weights makes of them (medians)",
        ("networks", "CKA", "distance", "noise scale", "barriers", "before", "matched"),
        tuple(rows),
    )


def _correlation(gains: Sequence[float], values: Sequence[float]) -> str:
    return "" if len(set(values)) == 1 else f"{spearmanr(gains, values).statistic:+.2f}"


def _cka(point: Point) -> float:
    return point.means["cka"]


def _distance(point: Point) -> float:
    return point.means["distance"]


def _noise(point: Point) -> float:
    return point.noise_scale


def point_grid(panel: Panel) -> Grid:
    """All settings of a panel: means over seeds, by all methods of merging."""
    figures = {
        "accuracy": ("parents, %", 100, "{:.2f}"),
        "merged_accuracy": ("merged, %", 100, "{:.2f}"),
        "gain": ("gain", 100, "{:+.2f}"),
        "linear_gain": ("linear", 100, "{:+.2f}"),
        "task_arithmetic_gain": ("arithmetic", 100, "{:+.2f}"),
        "ties_gain": ("TIES", 100, "{:+.2f}"),
        "gain_over_best": ("over the best", 100, "{:+.2f}"),
        "barrier": ("barrier", 1, "{:.3f}"),
        "rebasin_barrier": ("matched", 1, "{:.3f}"),
        "distance": ("distance", 1, "{:.3f}"),
        "cosine": ("cosine", 1, "{:.3f}"),
        "cka": ("CKA", 1, "{:.3f}"),
        "effective_noise_scale": ("effective", 1, "{:.1e}"),
    }
    shown = [name for name in figures if any(name in point.means for point in panel.points)]
    knobs = [
        name
        for name in ("lr", "batch", "momentum", "weight_decay", "augment")
        if len({point.settings.get(name) for point in panel.points}) > 1
    ]
    rows = []
    for point in panel.points:
        cells = []
        for name in shown:
            _, factor, form = figures[name]
            if name not in point.means:
                cells.append("")
                continue
            text = form.format(factor * point.means[name])
            if name.endswith("gain") and name in point.deviations:
                text += f" ±{factor * point.deviations[name]:.2f}"
            cells.append(text)
        knob_cells = [f"{point.settings[name]:g}" for name in knobs]
        rows.append((f"{point.noise_scale:.1e}", *knob_cells, str(point.diverged or ""), *cells))
    names = [name.replace("_", " ") for name in knobs]
    headings = [figures[name][0] for name in shown]
    title = panel.name if panel.figure == "gain" else panel.name.rpartition(", ")[0]
    return Grid(title, ("noise scale", *names, "diverged", *headings), tuple(rows))


def remarks(panels: Sequence[Panel]) -> Iterator[str]:
    """What the panels say, in words."""
    for panel in panels:
        if panel.highest is not None:
            yield f"{panel.name}: {_of_optimum(panel)}"
        elif not panel.curves:
            yield f"{panel.name}: too few settings ended well for a curve."
        ratios = [panel.ratios[knob] for knob in ("lr", "batch") if knob in panel.ratios]
        if len(ratios) == 2:
            verdict = (
                "the noise scale foretells the gain at least twice as well as either alone"
                if min(ratios) >= 2
                else "that is less than a factor of two for one of them"
                if max(ratios) >= 2
                else "the noise scale does not foretell the gain twice as well as these"
            )
            yield (
                f"{panel.name}: gains scatter {ratios[0]:.1f} times as far around a curve in the learning "
                f"rate, and {ratios[1]:.1f} times as far around one in the batch size, as around one in the "
                f"noise scale; {verdict}."
            )


def _of_optimum(panel: Panel) -> str:
    found = panel.highest
    assert found is not None
    place = f"{100 * found.height:+.2f} points at a noise scale of {found.at:.1e}"
    share = f"{100 * found.interior:.0f} % of resampled curves are higher there than at either end"
    if found.interior >= SURE:
        return f"the gain has an interior optimum, {place} ({share})."
    return f"no interior optimum is certain: the curve is highest, {place}, but only {share}."
