"""Figures of a path between two models: loss above, spectra as ridges below, and a plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isthmus.paths.spectra import Spectra
from isthmus.reports.html_figures import COLOURS, drawn, plain

if TYPE_CHECKING:
    from isthmus.models.connection import Walk


def loss_figure(walks: Sequence[Walk]) -> str:
    """Held-out loss along every path, and the lines between the ends from which barriers are measured.

    Returns:
        An ``<svg>`` element, the same text for the same numbers.
    """

    def draw(figure: Any) -> None:
        place = figure.subplots()
        for index, walk in enumerate(walks):
            losses = walk.profile.values["loss"]
            colour = COLOURS[index % len(COLOURS)]
            place.plot(walk.profile.ts, losses, marker=".", color=colour, label=plain(walk.name))
            place.plot([0, 1], [losses[0], losses[-1]], color=colour, linewidth=0.6, linestyle=":")
        place.set_xlabel("t")
        place.set_ylabel("held-out loss")
        place.grid(linewidth=0.4)
        place.legend(frameon=False)

    return drawn(draw, (7, 3.2))


def ridge_figure(spectra: Spectra, names: Sequence[str]) -> str:
    """For each matrix the distribution of its singular values at every t, one ridge above another.

    Beside each ridge stands its stable rank ‖W‖_F² / ‖W‖₂².

    Returns:
        An ``<svg>`` element, the same text for the same numbers.
    """

    def draw(figure: Any) -> None:
        columns = 3
        rows = -(-len(names) // columns)
        places = figure.subplots(rows, columns, squeeze=False).flat
        for place, name in zip(places, names, strict=False):
            edges, densities = spectra.histogram(name)
            middles = ((edges[1:] + edges[:-1]) / 2).tolist()
            height = float(densities.max()) or 1.0
            ranks = spectra.series("stable_rank", name)
            for index, (t, row) in enumerate(zip(spectra.ts, densities, strict=True)):
                values = (index + 0.9 * row / height).tolist()
                place.fill_between(middles, index, values, alpha=0.6, color=COLOURS[0], linewidth=0)
                place.plot(middles, values, color=COLOURS[0], linewidth=0.8)
                place.text(
                    middles[-1],
                    index + 0.1,
                    f"t={t:g}, rank {ranks[index]:.1f}",
                    ha="right",
                    size=6,
                )
            place.set_title(plain(name), size=6)
            place.set_yticks([])
            place.tick_params(labelsize=6)
        for place in list(places):
            place.set_visible(False)

    return drawn(draw, (9, 2.0 * -(-len(names) // 3)))


def plane_figure(plane: Mapping[str, Any]) -> str:
    """The held-out loss on the plane through both ends and the bend.

    Returns:
        An ``<svg>`` element, the same text for the same numbers.
    """

    def draw(figure: Any) -> None:
        place = figure.subplots()
        drawn = place.contourf(plane["xs"], plane["ys"], plane["loss"], levels=14, cmap="viridis")
        figure.colorbar(drawn, ax=place, label="held-out loss")
        (ax, ay), (bx, by), (cx, cy) = plane["corners"]
        place.plot([ax, cx, bx], [ay, cy, by], color="white", linewidth=1)
        for label, x, y in (("A", ax, ay), ("B", bx, by), ("bend", cx, cy)):
            place.plot(x, y, "o", color="white")
            place.annotate(label, (x, y), color="white", xytext=(4, 4), textcoords="offset points")

    return drawn(draw, (5.5, 4))
