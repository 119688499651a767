"""The demo's report: one HTML file that needs no other file and no network."""

from __future__ import annotations

from pathlib import Path

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from isthmus.lab.results import DemoResults
from isthmus.lab.tables import cell, label
from isthmus.reports.html_figures import accuracy_figure


def demo_report(results: DemoResults) -> str:
    """Render a demo run as HTML.

    Every value is escaped by the template engine; the figure alone is taken as markup, and its
    labels were escaped when it was drawn.

    Args:
        results: What `isthmus.lab.demo.run_demo` returned.
    """
    environment = Environment(
        loader=PackageLoader("isthmus.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    figure = accuracy_figure(results.rows, results.tasks)
    return environment.get_template("demo.html.jinja").render(
        results=results,
        figure=Markup(figure),  # noqa: S704 (drawn here; labels are escaped by the SVG writer)
        cell=cell,
        label=label,
        as_yaml=lambda recipe: yaml.safe_dump(recipe, sort_keys=False),
    )


def write_demo_report(results: DemoResults, path: Path) -> None:
    """Write the report of a demo run to a file, replacing what is there."""
    path.write_text(demo_report(results), encoding="utf-8")
