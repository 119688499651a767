from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from conftest import average, copied
from rich.console import Console

import isthmus
from isthmus.errors import IsthmusError
from isthmus.lab.candidates import POSITIONS, SCALES, adapter_contests, contests
from isthmus.lab.demo import run_demo
from isthmus.lab.evaluate import Row, normalise
from isthmus.lab.progress import Narrator
from isthmus.lab.reactions import ReactionResults
from isthmus.lab.results import Choice, DemoResults
from isthmus.lab.settings import SIZES, DemoSettings, Sizes
from isthmus.lab.tables import accuracy_table, cell, label, reaction_remarks, remarks


@pytest.fixture
def narrator():
    return Narrator(Console(file=io.StringIO(), width=120))


def said(narrator):
    return narrator.console.file.getvalue()


def test_accuracy_is_divided_by_each_tasks_own_expert():
    assert normalise({"a": 0.4, "b": 0.9}, {"b": 0.6, "a": 0.8}) == {
        "a": pytest.approx(0.5),
        "b": pytest.approx(1.5),
    }


def test_an_expert_that_knows_nothing_divides_nothing():
    assert normalise({"a": 0.4}, {"a": 0.0}) == {"a": 0.0}


def test_the_mean_normalised_accuracy_is_a_mean_of_ratios():
    accuracy = {"a": 0.4, "b": 0.9}
    row = Row("x", "merged", accuracy, normalise(accuracy, {"a": 0.8, "b": 0.6}))
    assert row.mean_accuracy == pytest.approx(0.65)
    assert row.mean_normalised == pytest.approx((0.5 + 1.5) / 2)


def test_a_cell_shows_percent_and_share():
    assert cell(0.8125, 0.974) == "81.2 (97)"
    assert label(Row("ties", "merged", {}, {}, setting="λ=1", note="a note")) == "ties λ=1"


def test_every_method_has_the_same_number_of_tries():
    made = {
        contest.method: contest
        for contest in contests(Path("base"), {"a": Path("A"), "b": Path("B"), "c": Path("C")})
    }
    assert len(SCALES) == len(POSITIONS)
    tries = {method: len(contest.candidates) for method, contest in made.items()}
    assert tries.pop("linear") == tries.pop("passthrough") == 1
    assert set(tries.values()) == {len(SCALES)}
    assert made["slerp"].tasks == ("a", "c")
    assert made["passthrough"].tasks == ("a",)
    names = {method: contest.candidates[-1].recipe["name"] for method, contest in made.items()}
    assert names["ties"] == "ties of a, b and c"
    assert names["slerp"] == "slerp of a and c"
    assert names["passthrough"] == "passthrough of a"


def test_adapters_have_as_many_tries_and_become_whole_models():
    made = adapter_contests(Path("base"), {"a": Path("A"), "b": Path("B")})
    for contest in made:
        assert len(contest.candidates) == len(SCALES)
        for candidate in contest.candidates:
            assert candidate.recipe["output"] == "full"
            assert candidate.recipe["base_model"] == "base"
            assert candidate.recipe["name"] == f"{contest.method} of a and b"


def test_a_run_from_end_to_end_and_again(tmp_path, tiny, narrator, small_encoder, monkeypatch):
    monkeypatch.setattr("isthmus.lab.demo.minilm", lambda: small_encoder)
    first = run_demo(
        tmp_path, settings=tiny, merge=average, extract=copied, narrator=narrator, reactions=False
    )
    assert [row.name for row in first.rows] == [
        "base",
        "movies expert",
        "tweets expert",
        "linear",
        "task_arithmetic",
        "ties",
        "dare_linear",
        "dare_ties",
        "slerp",
        "passthrough",
        "geomerge",
        "knots_ties",
    ]
    rows = {row.name: row for row in first.rows}
    assert rows["passthrough"].accuracy == rows["movies expert"].accuracy
    assert rows["movies expert"].normalised["movies"] == 1
    assert rows["tweets expert"].normalised["tweets"] == 1
    assert "Test accuracy" in said(narrator)
    assert "slerp: of the" not in said(narrator)  # Of two tasks it takes both.
    assert "passthrough: a copy of the movies expert only.\n" in said(narrator)
    assert "±13.7 points at 75 % with 10 examples" in said(narrator)
    stages = [stage.name for stage in first.stages]
    assert "Trials of ties (3 merges, validation)" in stages
    assert "Merge by linear" in stages
    assert "geomerge: of adapters of rank 8 taken out of the experts.\n" in said(narrator)

    saved = json.loads((tmp_path / "results.json").read_text())
    assert [row["name"] for row in saved["rows"]] == list(rows)
    assert saved["rows"][0]["mean_accuracy"] == first.rows[0].mean_accuracy
    assert sorted(path.name for path in (tmp_path / "merged").iterdir()) == sorted(first.choices)

    expert = tmp_path / "experts" / "movies" / "model.safetensors"
    readable = (tmp_path / "results.json").stat().st_mode
    assert expert.stat().st_mode == readable
    assert (tmp_path / "heads" / "movies.safetensors").stat().st_mode == readable
    made = expert.stat().st_mtime_ns
    again = run_demo(tmp_path, settings=tiny, merge=average, extract=copied, reactions=False)
    assert expert.stat().st_mtime_ns == made
    assert [row.accuracy for row in again.rows] == [row.accuracy for row in first.rows]
    assert not any(stage.name.startswith(("Head", "Expert")) for stage in again.stages)
    assert any(stage.name.startswith("Test") for stage in again.stages)


def test_the_demo_names_its_merges(tmp_path, small_encoder):
    (contest, *_) = contests(small_encoder, {"a": small_encoder, "b": small_encoder})
    isthmus.merge(contest.candidates[0].recipe, tmp_path / ".linear.trial")
    card = (tmp_path / ".linear.trial" / "README.md").read_text("utf-8")
    assert "\n# linear of a and b\n" in card


def some_results(setting="λ=1.5", longest="task_arithmetic"):
    """The longest labels and widest cells that there are."""
    scores = dict.fromkeys(SIZES, 0.754)
    shares = dict.fromkeys(SIZES, 1.0)
    grid = {f"λ={scale:g}": 0.9 for scale in SCALES}
    return DemoResults(
        settings=DemoSettings(),
        classes=dict.fromkeys(SIZES, ("bad", "good")),
        rows=(
            Row("base", "base", scores, shares),
            Row(longest, "merged", scores, shares, 10.25, setting, "a note"),
        ),
        choices={longest: Choice(setting, {}, grid)},
        stages=(),
        environment={},
        reactions=None,
    )


def test_the_table_fits_a_terminal_without_folding():
    console = Console(file=io.StringIO(), width=80)
    console.print(accuracy_table(some_results()))
    lines = console.file.getvalue().splitlines()
    assert any("task_arithmetic λ=1.5" in line and "10.2 s" in line for line in lines)


def test_the_lines_below_the_table_warn_of_noise_and_edges():
    told = list(remarks(some_results()))
    assert told[0] == "task_arithmetic: a note."
    assert "±1.9 points at 75 % with 500 examples. Do not read a ranking into a point" in told[1]
    assert told[2].startswith("task_arithmetic: λ=1.5 lies at the edge of its grid (λ=0.5, λ=1, ")
    assert not any("edge" in line for line in remarks(some_results("λ=1")))
    assert any("edge" in line for line in remarks(some_results("λ=0.5")))
    written = some_results().as_json()["choices"]["task_arithmetic"]
    assert written["at_edge"] is True


def test_the_reaction_models_come_with_an_explanation():
    found = ReactionResults({}, 1, 2, {"a": 0.1}, 0.2, 0.3, 0.4, 103, {"base": 93, "merged": 87})
    told = list(reaction_remarks(found))
    assert told[0].endswith("of 103: base 93, merged 87.")
    assert "The base is expected to win" in told[1]


def test_one_task_alone_is_refused(tmp_path):
    alone = DemoSettings(sizes={"movies": Sizes(1, 1, 1, 8)})
    with pytest.raises(IsthmusError, match="two tasks"):
        run_demo(tmp_path, merge=average, extract=copied, settings=alone)


def test_stages_are_timed_and_told_in_plain_lines(narrator):
    with narrator.stage("Reading [a] file", 3) as advance:
        advance(3)
    assert narrator.stages[0].name == "Reading [a] file"
    assert narrator.stages[0].seconds >= 0
    assert said(narrator).startswith("Reading [a] file ... 0.0 s (CPU ")


def test_stages_have_a_bar_on_a_terminal():
    narrator = Narrator(Console(file=io.StringIO(), force_terminal=True, width=80))
    with narrator.stage("Reading", 3) as advance:
        advance(1)
    assert "Reading ... 0.0 s" in said(narrator)
