from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from isthmus.lab.evaluate import Row
from isthmus.lab.progress import Stage
from isthmus.lab.results import Choice, DemoResults
from isthmus.lab.settings import DemoSettings, Sizes
from isthmus.reports.html import demo_report, write_demo_report

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
            Row("ties", "merged", scores, shares, merge_seconds=1.25, note="lambda = $x_1$"),
        ),
        choices={
            "ties": Choice(
                "lambda = 1", {"merge_method": "ties", "note": task}, {"lambda = 1": 0.97}
            )
        },
        stages=(Stage(f"Expert of {task}", 1.0, 2.0),),
        environment={"torch": "2"},
        reactions=None,
    )


class References(HTMLParser):
    """Collects whatever a browser would fetch, and every tag."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data", "srcset") and value:
                self.fetched.append(value)


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
    "shown", ["80.0 (95)", "1.2", "merge_method: ties", "97.0 %", "bad &amp; ugly"]
)
def test_the_report_shows(shown):
    assert shown in demo_report(results())


def test_the_report_is_written_as_utf8(tmp_path):
    write_demo_report(results(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!doctype html>")
