"""The report of `isthmus connect`: results as data, and one HTML file that needs no other."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from isthmus.reports.connection_figures import loss_figure, plane_figure, ridge_figure
from isthmus.reports.html import render

if TYPE_CHECKING:
    from isthmus.models.connection import Connection

FIGURES = ("stable_rank", "effective_rank", "tail_mass", "operator_norm", "max_norm")


def connection_data(found: Connection, a: str, b: str) -> dict[str, Any]:
    """Everything that was found, as JSON values.

    Args:
        found: Between two models.
        a: The first, as the user wrote it.
        b: The second.
    """
    return {
        "a": a,
        "b": b,
        "settings": asdict(found.settings),
        "verdict": found.verdict,
        "distance": {"before": found.before, "after alignment": found.distance},
        "examples": {"training": found.training, "held out": found.held_out},
        "paths": [
            {
                "path": walk.name,
                "barrier (a)": walk.a.value,
                "barrier (b)": walk.b.value,
                "barrier (b) at t": walk.b.at,
                "t": list(walk.profile.ts),
                **{name: list(values) for name, values in walk.profile.values.items()},
            }
            for walk in found.walks
        ],
        "spectra": {
            "t": list(found.spectra.ts),
            "matrices": {
                name: {figure: found.spectra.series(figure, name) for figure in FIGURES}
                for name in found.spectra.by_name
            },
        },
        "curvature": [
            {"t": t, "top eigenvalue": top, "trace": trace}
            for t, (top, trace) in found.curvature.items()
        ],
        "plane": found.plane,
    }


def write_connection_report(found: Connection, a: str, b: str, path: Path) -> None:
    """Write the HTML file, replacing what is there."""
    # The SVG writer escapes labels.
    markup = [
        loss_figure(found.walks),
        ridge_figure(found.spectra, list(found.spectra.by_name)),
        *([plane_figure(found.plane)] if found.plane else []),
    ]
    text = render(
        "connection.html.jinja",
        found=found,
        a=a,
        b=b,
        figures=[Markup(svg) for svg in markup],  # noqa: S704
    )
    path.write_text(text, encoding="utf-8")
