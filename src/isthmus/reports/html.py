"""HTML reports: one file that needs no other file and no network. The demo's is here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from isthmus.lab.candidates import Recipe
from isthmus.lab.evaluate import Row
from isthmus.lab.results import DemoResults
from isthmus.lab.tables import WHY_THE_BASE_WINS, cell, label, remarks
from isthmus.reports.html_figures import accuracy_figure


def demo_report(results: DemoResults, output: Path | None = None) -> str:
    """Render a demo run as HTML.

    Every value is escaped by the template engine; the figure alone is taken as markup, and its
    labels were escaped when it was drawn.

    Args:
        results: What `isthmus.lab.demo.run_demo` returned.
        output: The folder that it wrote to; paths in it are shown relative to it.
    """
    return render(
        "demo.html.jinja",
        results=results,
        figure=figure_markup(results.rows, results.tasks),
        cell=cell,
        label=label,
        remarks=list(remarks(results)),
        why_the_base_wins=WHY_THE_BASE_WINS,
        as_yaml=lambda recipe: recipe_yaml(recipe, output),
    )


def render(template: str, **values: Any) -> str:
    """Fill one of the HTML templates; every value in it is escaped, except markup."""
    environment = Environment(
        loader=PackageLoader("isthmus.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def figure_markup(rows: Sequence[Row], tasks: Sequence[str]) -> Markup:
    """The figure of normalised accuracies, to stand in a page."""
    return Markup(accuracy_figure(rows, tasks))  # noqa: S704 (the SVG writer escapes labels)


def recipe_yaml(recipe: Recipe, output: Path | None) -> str:
    """A recipe as YAML, with paths that mean something on other machines too."""
    return yaml.safe_dump(_with_short_paths(recipe, output), sort_keys=False, allow_unicode=True)


def write_demo_report(results: DemoResults, path: Path) -> None:
    """Write the report of a demo run to a file, replacing what is there."""
    path.write_text(demo_report(results, path.parent), encoding="utf-8")


def _with_short_paths(value: Any, output: Path | None) -> Any:
    """A recipe whose paths mean something on other machines too.

    What lies in an installed package is shown as the package and the path in it.
    """
    if isinstance(value, dict):
        return {key: _with_short_paths(part, output) for key, part in value.items()}
    if isinstance(value, list):
        return [_with_short_paths(part, output) for part in value]
    if not isinstance(value, str):
        return value
    path = Path(value)
    for packages in ("site-packages", "dist-packages"):
        if packages in path.parts:
            last = len(path.parts) - path.parts[::-1].index(packages)
            return Path(*path.parts[last:]).as_posix()
    if output is not None and path.is_absolute() is output.is_absolute():
        return path.relative_to(output).as_posix() if path.is_relative_to(output) else value
    return value
