"""Figures of the projection experiments: captured energy against accuracy."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.reports.html_figures import COLOURS, MARKERS, plain, svg_element

LEAST = -1.0
"""Energies below are drawn at this edge: a merge can be worse than the base without limit."""


@dataclass(frozen=True)
class Cloud:
    """Points of one kind.

    Attributes:
        label: For the legend.
        energies: Captured energies.
        accuracies: In percent.
    """

    label: str
    energies: Sequence[float]
    accuracies: Sequence[float]


def energy_figure(panels: Sequence[tuple[str, Sequence[Cloud]]], accuracy: str) -> str:
    """Draw accuracy against captured energy, a panel for each kind of energy.

    Args:
        panels: What each panel's energy is, and its points; the same labels in all.
        accuracy: What the accuracies are.

    Returns:
        An ``<svg>`` element, the same text for the same numbers.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # A fixed salt and no date make the file the same on every run.
    with rc_context({"svg.hashsalt": "isthmus", "svg.fonttype": "none"}):
        figure = Figure(figsize=(4.2 * len(panels), 4), layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for place, (title, clouds) in zip(axes, panels, strict=True):
            for index, cloud in enumerate(clouds):
                place.plot(
                    [max(energy, LEAST) for energy in cloud.energies],
                    cloud.accuracies,
                    linestyle="none",
                    marker=MARKERS[index % len(MARKERS)],
                    color=COLOURS[index % len(COLOURS)],
                    alpha=0.8,
                    label=plain(cloud.label),
                )
            place.set_xlabel(plain(title))
            place.grid(linewidth=0.4)
        axes[0].set_ylabel(plain(accuracy))
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return svg_element(buffer.getvalue())
