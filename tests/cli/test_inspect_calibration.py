"""`isthmus inspect --calibration` as people use it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from isthmus.checkpoints import open_checkpoint
from isthmus.cli.main import app
from isthmus.errors import CalibrationError, IsthmusError, OutputError
from isthmus.models.store import store_moments

from ..models.networks import LAYERS, build, padded, saved, sequences


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A base, two experts and their statistics."""
    folder = tmp_path_factory.mktemp("family")
    saved(folder / "base", "llama")
    for number in (1, 2):
        network = build("llama")
        draw = torch.Generator().manual_seed(number)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))
        network.save_pretrained(folder / f"expert{number}")
        with open_checkpoint(str(folder / f"expert{number}")) as checkpoint:
            store_moments(checkpoint, padded(sequences(number)), folder / f"stats{number}")
    return folder


@pytest.fixture
def arguments(family):
    models = [family / name for name in ("base", "expert1", "expert2")]
    stats = [f"--calibration={family / name}" for name in ("stats1", "stats2")]
    return [*models, *stats]


def invoke(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def refused(kind, *arguments):
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, IsthmusError), result.output
    assert type(result.exception) is kind
    return str(result.exception)


def strict(text):
    """JSON as the standard has it, without NaN and Infinity."""

    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_help_teaches():
    shown = invoke("--help").stdout
    assert "--calibration math.stats --calibration code.stats" in shown


def test_the_diagnosis_stands_below_the_comparison(arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    comparison, _, diagnosis = result.stdout.partition("On the calibration inputs")
    assert "These models can be merged." in comparison
    for merge in ("soup", "task arithmetic", "TIES", "DARE", "scalar", "diagonal", "optimal"):
        assert re.search(rf"^{merge} +[\d.]+ +-?[\d.]+ +", diagnosis, re.M), merge
    assert re.search(r"^8 +[\d.]+ +[\d.]+$", diagnosis, re.M)
    assert re.search(r"^(Take|No merge is worth it)", diagnosis, re.M)
    assert f"{7 * LAYERS + 1 - 10} more layers (--all)" in diagnosis
    everything = invoke(*arguments, "--all").stdout
    assert "more layers" not in everything
    for number in range(LAYERS):
        assert f"model.layers.{number}.self_attn.q_proj.weight" in everything


def test_json_has_every_number(arguments):
    data = strict(invoke(*arguments, "--json").stdout)
    assert data["comparison"]["mergeable"] is True
    diagnosis = data["diagnosis"]
    assert len(diagnosis["layers"]) == 7 * LAYERS + 1
    for name, merge in diagnosis["merges"].items():
        assert merge["captured"] == pytest.approx(1 - merge["left"]), name
    values = diagnosis["total"]["values"]
    for layer in diagnosis["layers"].values():
        assert layer["values"]["optimal"] < layer["values"]["diagonal"] < layer["initial"]
    assert values["diagonal"] == pytest.approx(
        sum(layer["values"]["diagonal"] for layer in diagnosis["layers"].values())
    )
    recommended = diagnosis["recommendation"]["merge"]
    assert recommended is None or recommended in diagnosis["merges"]
    assert sum(layer["share_of_what_is_left"] for layer in diagnosis["layers"].values()) == (
        pytest.approx(1)
    )


def test_the_report_is_written(arguments, tmp_path):
    path = tmp_path / "report.html"
    assert f"The report is {path}" in invoke(*arguments, "--report", path).stdout
    assert "Diagnosis before a merge" in path.read_text("utf-8")


def test_the_commands_of_the_page_run(family, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "inspect.md"
    commands = re.findall(
        r"^\$ isthmus (inspect base .*--calibration.*)$", page.read_text("utf-8"), re.M
    )
    assert len(commands) == 2
    monkeypatch.chdir(family)
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, (command, result.output, result.exception)
    assert (family / "report.html").is_file()


def test_without_calibration_nothing_changes(arguments):
    assert "calibration inputs" not in invoke(*arguments[:3]).stdout
    assert "diagnosis" not in strict(invoke(*arguments[:3], "--json").stdout)


def test_the_base_as_an_expert(family):
    with open_checkpoint(str(family / "base")) as checkpoint:
        store_moments(checkpoint, padded(sequences(3)), family / "own")
    names = ("base", "base", "expert1")
    stats = [f"--calibration={family / name}" for name in ("own", "stats1")]
    result = invoke(*(family / name for name in names), *stats)
    assert result.exit_code == 0, result.output
    assert "Expert 1 equals the base in all layers." in result.stdout
    assert "nan" not in result.stdout


def test_nothing_but_the_base(family):
    with open_checkpoint(str(family / "base")) as checkpoint:
        store_moments(checkpoint, padded(sequences(3)), family / "own")
    result = invoke(family / "base", family / "base", f"--calibration={family / 'own'}")
    assert "there is nothing to merge" in result.stdout
    strict(
        invoke(family / "base", family / "base", f"--calibration={family / 'own'}", "--json").stdout
    )


@pytest.mark.parametrize("count", [0, 1])
def test_statistics_for_each_expert(arguments, count, family):
    extra = [f"--calibration={family / 'stats1'}"] * count
    message = refused(CalibrationError, *arguments[:4], *extra, *extra)
    assert "for 2 experts" in message
    assert "once for each expert" in message


def test_statistics_in_another_order(arguments):
    message = refused(CalibrationError, *arguments[:3], *arguments[:2:-1])
    assert "of another model than" in message


def test_no_statistics(arguments, family):
    message = refused(CalibrationError, *arguments[:4], f"--calibration={family / 'base'}")
    assert "holds no calibration statistics" in message


def test_a_report_without_calibration(arguments, tmp_path):
    message = refused(CalibrationError, *arguments[:3], "--report", tmp_path / "report.html")
    assert "isthmus calibrate" in message


def test_a_report_nowhere(arguments, tmp_path):
    message = refused(OutputError, *arguments, "--report", tmp_path / "absent" / "report.html")
    assert "there is no folder" in message
