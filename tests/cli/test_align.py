"""`isthmus align` as people use it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from isthmus.cli.main import app

from ..engine.test_align import apart, model, tensors, transformed


def invoke(*arguments):
    return CliRunner().invoke(app, ["align", *map(str, arguments)])


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    transformed(model(tmp_path / "a"), tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_help_says_what_it_does():
    shown = invoke("--help").stdout
    assert "isthmus align ./model-a ./model-b -o model-b-aligned" in shown
    for word in (
        "--match",
        "--data",
        "--axes",
        "--residual",
        "--seed",
        "--dtype",
        "--resume",
        "--overwrite",
        "--json",
    ):
        assert word in shown


def test_a_copy_comes_back_and_is_described(workplace):
    result = invoke("a", "b", "-o", "out")
    assert result.exit_code == 0, result.output
    assert "b was aligned to a by weights: relative distance " in result.stdout
    assert result.stdout.splitlines()[-1] == "out: b in the coordinates of a"
    assert apart(tensors(workplace / "a"), tensors(workplace / "out")) < 1e-4


@pytest.mark.usefixtures("workplace")
def test_the_outcome_as_data():
    result = invoke("a", "b", "-o", "out", "--json")
    assert "aligned to a by weights" in json.loads(result.stdout)["notes"][-1]


def test_nothing_is_overwritten_unasked(workplace):
    assert invoke("a", "b", "-o", "out").exit_code == 0
    before = (workplace / "out" / "model.safetensors").read_bytes()
    assert invoke("a", "b", "-o", "out", "--seed", 3).exit_code != 0
    assert (workplace / "out" / "model.safetensors").read_bytes() == before
    assert invoke("a", "b", "-o", "out", "--overwrite").exit_code == 0


@pytest.mark.usefixtures("workplace")
def test_into_an_input():
    assert invoke("a", "b", "-o", "b", "--overwrite").exit_code != 0
    assert invoke("a", "b", "-o", "a", "--overwrite").exit_code != 0
