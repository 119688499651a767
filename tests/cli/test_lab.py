from __future__ import annotations

import pytest
from typer.testing import CliRunner

from isthmus.cli.main import app


def invoke(*arguments):
    return CliRunner().invoke(app, ["lab", *arguments])


@pytest.fixture
def asked(monkeypatch):
    """What the suite is asked for; it then ends."""
    found = {}

    def run(out, **options):
        found.update(options, out=out)
        raise SystemExit(0)

    monkeypatch.setattr("isthmus.lab.adapters.run_adapters", run)
    return found


@pytest.mark.parametrize(
    ("given", "seeds"), [("5", (5,)), ("0,1, 2", (0, 1, 2)), ("3 4", (3, 4)), (None, (0, 1, 2))]
)
def test_seeds_are_one_or_many(asked, given, seeds):
    assert invoke("adapters", *([] if given is None else ["--seeds", given])).exit_code == 0
    assert asked["settings"].seeds == seeds


def test_quick_is_smaller(asked):
    invoke("adapters")
    whole = asked["settings"]
    invoke("adapters", "--quick")
    quick = asked["settings"]
    assert quick.tries < whole.tries
    for task, size in whole.sizes.items():
        assert quick.sizes[task].train < size.train
        assert quick.sizes[task].test < size.test


@pytest.mark.parametrize("text", ["", "a", "1,,2", "-1", "1.5"])
def test_other_seeds_are_refused_before_anything_is_loaded(asked, text):
    shown = invoke("adapters", f"--seeds={text}")
    assert shown.exit_code == 2
    assert "whole numbers" in shown.output
    assert asked == {}


def test_absent_data_is_an_error_that_names_the_target(tmp_path):
    shown = invoke("adapters", "--cache", str(tmp_path / "none"), "--out", str(tmp_path / "out"))
    assert shown.exit_code == 1
    assert "make data" in str(shown.exception)


def test_help_lists_the_experiments():
    assert "adapters" in invoke("--help").output
    assert "--quick" in invoke("adapters", "--help").output


def test_the_vision_family_has_its_own_tasks_and_folder(asked):
    invoke("adapters", "--family", "vision", "--seeds", "4")
    assert asked["settings"].family == "vision"
    assert asked["settings"].seeds == (4,)
    assert "mnist_low" in asked["settings"].sizes
    assert asked["out"].as_posix() == "lab-adapters/vision"
    invoke("adapters")
    assert asked["settings"].family == "text"
    assert asked["out"].as_posix() == "lab-adapters/text"


PROJECTION = {
    "digits": "digits.run_all_digits",
    "vision": "run.run_projection",
    "text": "run.run_projection",
    "language": "language.run_language",
}


@pytest.mark.parametrize("experiment", PROJECTION)
def test_projection_runs_the_experiment_that_is_asked_for(monkeypatch, experiment):
    asked = []

    def run(out, **options):
        asked.append({**options, "out": out.as_posix()})
        raise SystemExit(0)

    monkeypatch.setattr(f"isthmus.lab.projection.{PROJECTION[experiment]}", run)
    for more in ([], ["--quick", "--seeds", "4", "--out", "there"]):
        assert invoke("projection", "--experiment", experiment, *more).exit_code == 0
    whole, quick = asked
    assert whole["out"] == f"lab-projection/{experiment}"
    assert whole["settings"].seeds == (0, 1, 2)
    assert quick["out"] == "there"
    assert quick["settings"].seeds == (4,)
    assert quick["settings"].tries < whole["settings"].tries
    if experiment in ("vision", "text"):
        assert whole["settings"].family == experiment


def test_projection_wants_an_experiment_and_numbers():
    assert "--experiment" in invoke("projection").output
    assert invoke("projection", "--experiment", "poems").exit_code == 2
    shown = invoke("projection", "--experiment", "text", "--seeds=a")
    assert shown.exit_code == 2
    assert "whole numbers" in shown.output
