"""A page of the lab: one HTML file that needs no other file and no network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup

from isthmus.lab.candidates import Recipe
from isthmus.lab.grid import Grid
from isthmus.reports.html import recipe_yaml, render


@dataclass(frozen=True)
class Page:
    """What a report shows.

    Attributes:
        title: The heading.
        intro: Sentences below it.
        grids: Tables.
        remarks: What stands below the tables.
        figures: Markup that was escaped where it was drawn.
        environment: Versions.
        recipes: By seed and name.
    """

    title: str
    intro: str
    grids: Sequence[Grid]
    remarks: Sequence[str]
    figures: Sequence[Markup]
    environment: Mapping[str, str]
    recipes: Mapping[str, Mapping[str, Recipe]] = field(default_factory=dict)


def write_page(page: Page, path: Path, root: Path | None = None) -> None:
    """Write a report, replacing what is there.

    Args:
        page: What to show.
        path: The file.
        root: The folder that paths in recipes are shown relative to.
    """
    text = render(
        "lab_page.html.jinja",
        page=page,
        as_yaml=lambda recipe: recipe_yaml(recipe, root),
    )
    path.write_text(text, encoding="utf-8")


def file_name(title: str) -> str:
    """Letters and digits of a title, words joined by hyphens."""
    return re.sub("[^a-z0-9]+", "-", title.lower()).strip("-")


def write_figures(figures: Mapping[str, str], folder: Path) -> None:
    """Write figures one by one, as NAME.svg.

    Args:
        figures: By name.
        folder: Made if it is missing.
    """
    folder.mkdir(exist_ok=True)
    for name, figure in figures.items():
        (folder / f"{name}.svg").write_text(figure, encoding="utf-8")


def markup(svg: str) -> Markup:
    """A figure that isthmus drew, to stand in a page."""
    return Markup(svg)  # noqa: S704 (the SVG writer escapes labels)
