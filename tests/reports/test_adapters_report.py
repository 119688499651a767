from __future__ import annotations

from pathlib import Path

import pytest
from test_html import EVIL, read

from isthmus.lab.adapters_distance import Likeness
from isthmus.lab.adapters_results import AdapterResults, MergeDetail, SeedResults
from isthmus.lab.adapters_settings import ADAPTER_SIZES, AdapterSettings
from isthmus.lab.evaluate import Row, normalise
from isthmus.reports.adapters import adapters_report, write_adapters_report


def results(task: str = "tweets") -> AdapterResults:
    def row(name, kind, value, seconds=None):
        accuracy = {"movies": value, task: value}
        return Row(name, kind, accuracy, normalise(accuracy, {"movies": 0.8, task: 0.8}), seconds)

    recipe = {
        "merge_method": "ties",
        "models": [{"model": "/cache/lab-adapters/seed-0/adapters/tweets"}],
        "name": task,
    }
    return AdapterResults(
        settings=AdapterSettings(
            sizes={"movies": ADAPTER_SIZES["imdb"], task: ADAPTER_SIZES["imdb"]}
        ),
        classes={"movies": ("bad & ugly", "good"), task: ("bad", "good")},
        seeds=tuple(
            SeedResults(
                seed,
                (
                    row("base", "base", 0.6),
                    row("single adapters", "expert", 0.8),
                    row("ties", "merged", 0.7 + 0.04 * seed, 1.5),
                ),
                {"ties": MergeDetail(96, recipe, {"λ=1": 0.91}, True, (task,))},
                Likeness(8.25, 0.125, 0.02),
            )
            for seed in (0, 1)
        ),
        stages=(),
        environment={"torch": "2", "note": task},
    )


def test_nothing_is_fetched_and_names_are_escaped():
    page = adapters_report(results(EVIL))
    assert all(reference.startswith("#") for reference in read(page).fetched)
    assert "script" not in read(page).tags
    assert EVIL not in page


def test_tables_scroll_and_recipes_fold():
    assert read(adapters_report(results())).stray == []


@pytest.mark.parametrize(
    "shown",
    [
        '<td>ties</td><td class="n">96</td>',
        "72.0 (90)",
        "90.0 ±3.5",
        "λ=1: 91.0 %",
        "bad &amp; ugly",
        "merge_method: ties",
        "with\n2 seeds",
    ],
)
def test_the_report_shows(shown):
    assert shown in adapters_report(results())


def test_paths_are_relative_to_the_cache(tmp_path):
    write_adapters_report(results(), tmp_path / "report.html", Path("/cache"))
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "model: lab-adapters/seed-0/adapters/tweets" in page
    assert "/cache/" not in page
