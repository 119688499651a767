"""`isthmus advise` as people use it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from isthmus.cli.main import app
from isthmus.errors import TrainingError

SGD = "optimizer: sgd\nlr: {lr}\nbatch_size: 64\nmomentum: 0.9\nweight_decay: 5.0e-4\n"


def invoke(*arguments):
    return CliRunner().invoke(app, ["advise", *map(str, arguments)])


@pytest.fixture
def training(tmp_path):
    path = tmp_path / "training.yaml"
    path.write_text(SGD.format(lr=0.01))
    return path


def test_what_is_said(training):
    said = invoke(training).stdout
    assert "Noise scale 1.56e-03: η/(B(1 − μ)) = 0.01/(64 · (1 − 0.9))" in said
    assert "Nearest experiment: " in said
    assert "BatchNorm" in said
    assert "Weight decay at one noise scale" in said
    assert "Limits:" in said
    assert "docs/lab-noise.md" in said


def test_json_says_the_same(training):
    found = json.loads(invoke(training, "--json").stdout)
    assert found["noise_scale"] == pytest.approx(0.01 / (64 * 0.1))
    assert found["experiment"]["name"] in invoke(training).stdout
    assert len(found["nearest"]) == 3
    assert found["limits"]
    assert found["verdict"] in invoke(training).stdout


def test_options_choose_the_experiment(training):
    found = json.loads(invoke(training, "--network", "mlp", "--split", "start", "--json").stdout)
    assert "MLP" in found["experiment"]["described"]
    assert found["assumed"] == []


def test_too_much_noise_is_told_what_to_change(training):
    chosen = ("--network", "mlp", "--split", "start")
    # The noisiest place that was measured.
    largest = json.loads(invoke(training, *chosen, "--json").stdout)["experiment"]["range"][1]
    training.write_text(SGD.format(lr=0.999 * largest * 64 * (1 - 0.9)))
    said = invoke(training, *chosen).stdout
    assert "There is too much noise" in said
    assert "- learning rate" in said
    assert "- batch size" in said


def test_the_state_of_a_trainer(tmp_path):
    state = {
        "train_batch_size": 8,
        "log_history": [{"learning_rate": 1e-4, "step": 1}, {"learning_rate": 5e-5, "step": 2}],
    }
    (tmp_path / "trainer_state.json").write_text(json.dumps(state))
    (tmp_path / "training_args.yaml").write_text("optim: adamw_torch\n")
    found = json.loads(invoke(tmp_path, "--devices", 4, "--accumulation", 2, "--json").stdout)
    assert found["settings"]["batch_size"] == 64
    assert found["noise_scale"] == pytest.approx(1e-4 / 8)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("batch_size: 8\noptimizer: sgd\n", "does not tell the learning rate"),
        ("lr: 0.1\nbatch_size: 0\noptimizer: sgd\n", "the batch size is 0"),
        ("lr: 0.1\noptimizer: sgd\n", "does not tell the batch size"),
        ("lr: 0.1\nbatch_size: 8\n", "does not tell the optimizer"),
        ("lr: 0.1\nbatch_size: 8\noptimizer: sgf\n", "Did you mean 'sgd'"),
        ("lr: 0.1\nbatch_size: 8\noptimizer: sgd\nmomentum: 1\n", "momentum is 1"),
        ("- a\n", "holds no settings by name"),
        ("{", "cannot be read"),
    ],
)
def test_bad_files(text, words, training):
    training.write_text(text)
    result = invoke(training)
    assert isinstance(result.exception, TrainingError)
    assert words in str(result.exception)
    assert "training.yaml" in str(result.exception)


def test_nothing_there(tmp_path):
    assert isinstance(invoke(tmp_path / "none.yaml").exception, TrainingError)
    assert isinstance(invoke(tmp_path).exception, TrainingError)


SFT = (
    "model_name_or_path: Qwen/Qwen2.5-7B\nlearning_rate: 2.0e-5\nper_device_train_batch_size: 2\n"
    "gradient_accumulation_steps: 8\nnum_processes: 8\noptim: adamw_torch\n"
)


def test_a_language_model_is_told_how_far_the_evidence_is(training):
    training.write_text(SFT)
    said = invoke(training).stdout
    assert "2e-05/√128, B = 2 · 8 · 8" in said
    assert "Qwen/Qwen2.5-7B, has by its name 7 billion" in said
    assert "momentum" not in said


def test_json_has_what_the_text_has(training):
    found = json.loads(invoke(training, "--json").stdout)
    assert {"flat", "collapse", "good", "assumed", "changes", "decays"} <= set(found)
    assert found["experiment"]["parameters"] > 0
    assert found["experiment"]["optimizer"] == "sgd"


def test_a_pickle_alone_in_a_folder(tmp_path):
    (tmp_path / "training_args.bin").write_bytes(b"")
    error = invoke(tmp_path).exception
    assert isinstance(error, TrainingError)
    assert "training_args.bin" in str(error.cure)


def test_json_that_is_none(tmp_path):
    path = tmp_path / "trainer_state.json"
    path.write_text("{'learning_rate': 1}")
    error = invoke(path).exception
    assert isinstance(error, TrainingError)
    assert "trainer_state.json cannot be read" in error.problem
