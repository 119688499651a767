"""The report of `isthmus inspect --calibration`: one HTML file that needs no other file and no network."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import yaml
from markupsafe import Markup

from isthmus.projection.diagnosis import BASES, LayerDiagnosis
from isthmus.projection.recommendation import Recommendation
from isthmus.reports.html import render
from isthmus.reports.html_figures import COLOURS, MARKERS, plain, svg_element

_HEURISTIC = "best heuristic"

_LOWEST = -0.5
"""The figure shows captured energies down to this one; a bad heuristic would squeeze all others."""


def diagnosis_report(
    labels: Sequence[str],
    layers: Mapping[str, LayerDiagnosis],
    left_out: Mapping[str, str],
    found: Recommendation,
) -> str:
    """Render a diagnosis as HTML.

    Every value is escaped by the template engine; the figure alone is taken as markup, and it holds no names.

    Args:
        labels: Of the base and its experts.
        layers: By name, in the network's order.
        left_out: Layers that were not judged, and why.
        found: What `recommend` made of them.
    """
    bases = [basis for basis in BASES if any(basis in one.projections for one in layers.values())]
    return render(
        "diagnosis.html.jinja",
        labels=labels,
        layers=layers,
        left_out=left_out,
        found=found,
        bases=bases,
        figure=Markup(captured_figure(layers, found)),  # noqa: S704 (the SVG writer escapes labels)
        recipe=yaml.safe_dump(found.chosen.recipe, sort_keys=False) if found.chosen else None,
        share=_share,
    )


def captured_figure(layers: Mapping[str, LayerDiagnosis], found: Recommendation) -> str:
    """Draw the captured energy of every layer by basis, and which layers hold the error that is left.

    Args:
        layers: By name, in the network's order.
        found: What `recommend` made of them.

    Returns:
        An ``<svg>`` element, the same text for the same numbers.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    places = range(1, len(layers) + 1)
    # A fixed salt and no date make the file the same on every run.
    with rc_context({"svg.hashsalt": "isthmus", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8.5, 5.5), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        for index, name in enumerate((*BASES, _HEURISTIC)):
            values = [_value(layer, name) for layer in layers.values()]
            known = {
                place: layer.captured(value)
                for place, layer, value in zip(places, layers.values(), values, strict=True)
                if value is not None
            }
            shown = {place: share for place, share in known.items() if share >= _LOWEST}
            upper.plot(
                list(shown),
                [100 * share for share in shown.values()],
                linestyle="none",
                marker=MARKERS[index],
                markersize=4,
                color=COLOURS[index],
                label=plain(name),
            )
        upper.axhline(0, color="black", linewidth=0.8)
        upper.set_ylabel("captured energy, %")
        upper.grid(axis="y", linewidth=0.4)
        lower.bar(places, [100 * found.hurting.get(name, 0.0) for name in layers], color="#666666")
        lower.set_ylabel("share of what\nis left, %")
        lower.set_xlabel("layer")
        figure.suptitle("What a merge can keep of the experts' outputs, layer by layer")
        figure.legend(loc="outside lower center", ncols=5, frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return svg_element(buffer.getvalue())


def _value(layer: LayerDiagnosis, name: str) -> float | None:
    """J in a basis if it is known, or of the best heuristic."""
    if name == _HEURISTIC:
        return layer.best_heuristic[1]
    return layer.projections.get(name)


def _share(value: float | None) -> str:
    """In percent; a dash where it is not known or has no meaning."""
    if value is None or abs(value) == float("inf"):
        return "–"
    return f"{100 * value:.1f}"
