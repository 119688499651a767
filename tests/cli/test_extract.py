"""`isthmus extract` as people use it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from isthmus import api
from isthmus.checkpoints import open_adapter
from isthmus.cli.main import app
from isthmus.engine.verify import verify

from ..engine.models import family


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    family(tmp_path, count=1)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(app, ["extract", *map(str, arguments)])


def test_help_says_what_it_does():
    shown = invoke("--help").stdout
    for word in ("--base", "--rank", "--energy", "--min-rank", "--max-rank", "--modules", "--save"):
        assert word in shown
    assert "isthmus extract ./tuned --base ./base -o adapter --rank 16" in shown


def test_an_adapter_and_a_table(workplace):
    result = invoke("expert1", "--base", "base", "-o", "out", "--energy", 0.9, "--save", "norm")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["module", "shape", "moved", "rank", "kept"]
    assert any(line.startswith("model.layers.0.mlp.down_proj") for line in lines)
    assert any("model.norm.weight" in line and line.endswith("saved") for line in lines)
    assert any("lm_head.weight" in line and line.endswith("left out") for line in lines)
    assert "out: 6 modules, ranks " in lines[-1]
    assert "note: 2 changed tensors are not in the adapter" in result.stderr
    assert verify(workplace / "out").problems == ()
    assert len(open_adapter(workplace / "out").updates) == 6


@pytest.mark.usefixtures("workplace")
def test_long_tables_are_cut_unless_all_is_asked_for(monkeypatch):
    monkeypatch.setattr("isthmus.cli.extract.SHOWN", 2)
    shown = invoke("expert1", "--base", "base", "-o", "out").stdout
    assert "and 4 more; --all prints them" in shown
    shown = invoke("expert1", "--base", "base", "-o", "out", "--overwrite", "--all").stdout
    assert "--all prints them" not in shown


@pytest.mark.usefixtures("workplace")
def test_the_outcome_as_data():
    result = invoke("expert1", "--base", "base", "-o", "out", "--rank", 3, "--json")
    data = json.loads(result.stdout)
    assert {module["rank"] for module in data["modules"]} == {3}
    assert 0 < data["kept_of_everything"] < data["kept"] < 1
    assert len(data["left_out"]) == 6
    assert data["saved"] == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", 3, "--energy", 0.5], "rank and energy exclude each other"),
        (["--max-rank", 3], "say something about --energy only"),
        (["--modules", "nothing"], "has no weight for LoRA"),
    ],
)
def test_options_that_cannot_be(workplace, options, message):
    result = invoke("expert1", "--base", "base", "-o", "out", *options)
    assert result.exit_code == 1
    assert message in str(result.exception)
    assert not (workplace / "out").exists()


@pytest.mark.usefixtures("workplace")
def test_ctrl_c_is_no_error(monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "extract", stop)
    result = invoke("expert1", "--base", "base", "-o", "out")
    assert result.exit_code == 130
    assert "stopped; nothing was written" in result.stderr
