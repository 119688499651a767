"""The report of `isthmus lab adapters`: one HTML file that needs no other file and no network."""

from __future__ import annotations

from pathlib import Path

from isthmus.lab.adapters_results import AdapterResults
from isthmus.lab.adapters_tables import adapters_remarks, kept
from isthmus.lab.tables import cell
from isthmus.reports.html import figure_markup, recipe_yaml, render


def adapters_report(results: AdapterResults, root: Path | None = None) -> str:
    """Render a run of the suite as HTML.

    Args:
        results: What `isthmus.lab.adapters.run_adapters` returned.
        root: The folder that paths in recipes are shown relative to: the run's cache.
    """
    return render(
        "adapters.html.jinja",
        results=results,
        figure=figure_markup(results.rows, results.tasks),
        cell=cell,
        kept=lambda row: kept(results, row),
        remarks=list(adapters_remarks(results)),
        as_yaml=lambda recipe: recipe_yaml(recipe, root),
    )


def write_adapters_report(results: AdapterResults, path: Path, root: Path | None = None) -> None:
    """Write the report of a run to a file, replacing what is there."""
    path.write_text(adapters_report(results, root), encoding="utf-8")
