from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_html import EVIL, read

from isthmus.lab.evaluate import Row, normalise
from isthmus.lab.projection.digits_results import (
    DigitsResults,
    DigitsRow,
    DigitsRun,
    DigitsSettings,
)
from isthmus.lab.projection.language_settings import (
    LanguageResults,
    LanguageRow,
    LanguageSeed,
    LanguageSettings,
)
from isthmus.lab.projection.results import (
    Checks,
    Merged,
    MergeDetail,
    ProjectionResults,
    SeedResults,
)
from isthmus.lab.projection.settings import ProjectionSettings
from isthmus.lab.projection.tables import checked, projection_grid, remarks
from isthmus.lab.settings import Sizes
from isthmus.reports.lab_page import write_page
from isthmus.reports.projection_figures import Cloud, energy_figure
from isthmus.reports.projection_lab import digits_page, encoders_page, language_page


def results(task="tweets", violations=()):
    checks = Checks(3, violations)

    def row(name, kind, value, seconds=None):
        accuracy = {"movies": value, task: value}
        return Row(name, kind, accuracy, normalise(accuracy, {"movies": 0.8, task: 0.8}), seconds)

    def detail(captured, own):
        recipe = {"merge_method": "projection", "name": task, "models": [{"model": "cache/x/y"}]}
        return MergeDetail(recipe, {}, True, captured, {"a": captured}, own, checks, (task,))

    def merged(number):
        accuracy = {"movies": 0.5, task: 0.5}
        return Merged(f"{task} {number}", task, number / 4, -20.0, 0.1 * number, accuracy, number)

    sizes = Sizes(train=100, validation=100, test=1000, max_length=10)
    return ProjectionResults(
        settings=ProjectionSettings(sizes={"movies": sizes, task: sizes}),
        classes={"movies": ("bad & ugly", "good"), task: ("bad", "good")},
        seeds=tuple(
            SeedResults(
                seed,
                (
                    row("base", "base", 0.6),
                    row("single experts", "expert", 0.8),
                    row("projection", "merged", 0.7 + 0.04 * seed, 1.5),
                ),
                {"projection": detail(0.5 + 0.1 * seed, None if seed else 0.7)},
                tuple(merged(number) for number in range(4)),
            )
            for seed in (0, 1)
        ),
        stages=(),
        environment={"torch": task},
    )


def test_means_over_seeds_stand_in_the_table():
    grid = projection_grid(results())
    assert grid.rows[0] == ("base", "60.0", "60.0", "75.0", "0.0", "", "")
    assert grid.rows[2] == ("projection", "72.0", "72.0", "90.0", "3.5", "0.55", "1.5")
    assert all(len(row) == len(grid.columns) for row in grid.rows)
    assert results().own("projection") == 0.7


def test_remarks_tell_the_correlation_and_the_edge():
    told = " ".join(remarks(results()))
    assert "all layers together 1.00" in told
    assert "mean over layers nan" in told
    assert "projection: in 2 of 2 seeds" in told
    assert "6 comparisons" in told


def test_a_violation_is_told_as_wrong():
    wrong = results(violations=("layer: soup",))
    assert any(line.startswith("WRONG: of 6") for line in remarks(wrong))
    assert "layer: soup" in checked(wrong.checks)


@pytest.fixture
def pages():
    row = LanguageRow("base", {EVIL: 1.0}, None, None)
    language = LanguageResults(
        LanguageSettings(),
        1234,
        (EVIL,),
        (LanguageSeed(0, (row, replace(row, name=EVIL, captured=-5e4)), {EVIL: {}}, {}),),
        (),
        {"torch": "2"},
    )
    made = DigitsRow(EVIL, 0.5, -30.0, 2.0, 0.75, 0.9, "λ=1", 3)
    digits = DigitsResults(
        DigitsSettings(experts=(2,), seeds=(0,), calibration=(8,)),
        (DigitsRun(0, 8, ((0,), (1,)), (0.9, 0.9), (made,), (made, made), 5, ()),),
        (),
        {"torch": EVIL},
    )
    return {
        "encoders": encoders_page(results(EVIL)),
        "language": language_page(language),
        "digits": digits_page(digits),
    }


@pytest.mark.parametrize("name", ["encoders", "language", "digits"])
def test_nothing_is_fetched_and_names_are_escaped(pages, name, tmp_path):
    write_page(pages[name], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert all(reference.startswith("#") for reference in read(page).fetched)
    assert EVIL not in page


def test_paths_in_recipes_are_relative(pages, tmp_path):
    write_page(pages["encoders"], tmp_path / "report.html", Path("cache"))
    assert "model: x/y" in (tmp_path / "report.html").read_text()


def test_the_language_page_has_perplexities(pages):
    (grid,) = pages["language"].grids
    assert grid.rows[0][1:3] == ("2.72", "2.72")
    assert "-5e+04" in grid.rows[1]


def test_energies_far_below_are_drawn_at_the_edge():
    near = energy_figure([("e", [Cloud("a", [-1.0, 0.5], [50.0, 60.0])])], "accuracy")
    far = energy_figure([("e", [Cloud("a", [-1e6, 0.5], [50.0, 60.0])])], "accuracy")
    assert near == far
    assert near != energy_figure([("e", [Cloud("a", [0.0, 0.5], [50.0, 60.0])])], "accuracy")
