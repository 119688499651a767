"""`isthmus inspect --noise` as people use it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from isthmus.checkpoints import open_checkpoint
from isthmus.cli import inspect_noise
from isthmus.cli.main import app
from isthmus.errors import IsthmusError
from isthmus.lab.data.named import training_data
from isthmus.models.noise_data import NoiseData
from isthmus.models.noise_report import noise_report

from ..models.networks import add_tokenizer, saved

WORDS = ("one", "two", "three", "four", "plus", "minus", "is", "not")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return add_tokenizer(saved(tmp_path_factory.mktemp("models") / "model", "llama"), WORDS)


@pytest.fixture
def data(tmp_path):
    chance = np.random.default_rng(0)
    texts = [" ".join(chance.choice(WORDS, chance.integers(2, 9))) for _ in range(48)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def shown(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def refused(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, IsthmusError), result.output
    return str(result.exception)


def strict(text):
    """JSON as the standard has it, without NaN and Infinity."""

    def fail(constant):
        raise AssertionError(constant)

    return json.loads(text, parse_constant=fail)


def test_help_teaches():
    text = invoke("--help").stdout
    assert "isthmus inspect ./math --noise --data problems.jsonl" in text
    assert "noise" in text


def test_what_is_printed_is_what_was_measured(model, data):
    with open_checkpoint(str(model)) as checkpoint:
        found = noise_report(checkpoint, NoiseData(data, batch=2, examples=40), sign_version=True)
    text = shown(model, "--noise", "--data", data, "--batch", 2, "--examples", 40, "--sign")
    assert "gradients of 40 texts in micro-batches of 2, 10 blocks of 2\n\n" in text
    for number in (found.total.trace, found.total.squared_norm, *found.total.trace_interval):
        assert f"{number:.4g}" in text
    assert f"sign version: from {found.sign.scale[0]:.4g} to {found.sign.scale[1]:.4g}" in text
    assert found.reading in text
    assert "model.layers.1" in text
    assert "spectral" not in text


def test_json_says_the_same(model, data):
    content = strict(
        shown(model, "--noise", "--data", data, "--batch", 2, "--json", "--spectral", "--sign")
    )
    noise = content["noise"]
    total = noise["total"]
    assert noise["examples"] == 48
    assert total["trace_interval"][0] < total["trace"] < total["trace_interval"][1]
    assert noise["spectral"]["noise"] > 0
    assert sum(block["trace"] for block in noise["blocks"].values()) == pytest.approx(
        total["trace"]
    )
    assert total["scale"] == pytest.approx(total["trace"] / total["squared_norm"])


def test_infinity_is_null(model, data):
    """Four texts do not tell ‖G‖² from 0."""
    text = shown(model, "--noise", "--data", data, "--batch", 1, "--examples", 4, "--json")
    total = strict(text)["noise"]["total"]
    assert total["independent_blocks"] == 2
    assert total["scale_interval"][1] is None
    assert "Noise hides" in strict(text)["noise"]["reading"]
    assert "∞" in shown(model, "--noise", "--data", data, "--batch", 1, "--examples", 4)


def test_blocks_are_ten_unless_all_are_asked_for(tmp_path, data):
    deep = add_tokenizer(saved(tmp_path / "deep", "llama", num_hidden_layers=12), WORDS)
    arguments = (deep, "--noise", "--data", data, "--batch", 1, "--examples", 4)
    few = shown(*arguments)
    assert few.count("model.layers.") + few.count("before") + few.count("after") == 10
    assert "4 more blocks (--all)" in few
    assert shown(*arguments, "--all").count("model.layers.") == 12


def test_beside_the_settings_of_a_training(model, data, tmp_path):
    path = tmp_path / "training.yaml"
    path.write_text("lr: 0.1\nbatch_size: 8\nmomentum: 0.9\noptimizer: sgd\n")
    text = shown(model, "--noise", "--data", data, "--training", path)
    assert "optimizer sgd, learning rate 0.1, batch 8, momentum 0.9" in text
    assert "effective noise scale η/(B(1 − μ)): 0.125" in text
    assert "diffusion of the weights" in text
    content = strict(shown(model, "--noise", "--data", data, "--training", path, "--json"))
    total, training = content["noise"]["total"], content["training"]
    assert training["effective_noise_scale"] == pytest.approx(0.125)
    assert training["diffusion"] == pytest.approx(0.125 * total["trace"])
    assert training["noise_over_signal"] == pytest.approx(total["scale"] / 8)


def test_a_trainer_state_says_what_it_lacks(model, data, tmp_path):
    path = tmp_path / "trainer_state.json"
    log = [{"learning_rate": 2e-5, "step": 1}]
    path.write_text(json.dumps({"log_history": log, "train_batch_size": 8, "global_step": 9}))
    text = shown(model, "--noise", "--data", data, "--training", path)
    assert "learning rate 2e-05, batch 8" in text
    assert "not known" in text
    assert "does not tell the optimizer" in text
    assert "noise over signal" in text


def test_a_pickle_is_not_opened(model, data, tmp_path):
    path = tmp_path / "training_args.bin"
    path.write_bytes(b"\x80\x04.")
    assert "pickle" in refused(model, "--noise", "--data", data, "--training", path)


def test_images_by_name(tmp_path):
    vit = saved(tmp_path / "vit", "vit", num_labels=10)
    text = shown(vit, "--noise", "--data", "digits", "--examples", 24, "--batch", 1)
    assert "gradients of 24 images in micro-batches of 1, 12 blocks of 2" in text
    assert "no data set 'digit'" in refused(vit, "--noise", "--data", "digit")


def test_images_of_names_are_those_of_the_lab(tmp_path):
    data = training_data("digits", tmp_path)
    pairs = list(inspect_noise._named("digits", tmp_path))
    assert [label for _, label in pairs] == data.targets.tolist()
    assert np.array_equal(pairs[7][0][..., 0], data.inputs[7, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--noise",), "Give --data"),
        (("--data", "x.jsonl"), "Add --noise"),
        (("--sign",), "Add --noise"),
        (("--noise", "--data", "x.jsonl", "--report", "r.html"), "one model alone"),
        (("--noise", "--data", "no.jsonl"), "there is no file no.jsonl"),
    ],
)
def test_options_that_do_not_go_together(model, arguments, message):
    assert message in refused(model, *arguments)


def test_several_models(model, data):
    assert "one model alone" in refused(model, model, "--noise", "--data", data)


def test_a_batch_larger_than_the_data(model, data):
    text = refused(model, "--noise", "--data", data, "--batch", 64)
    assert "larger than the data: 48 texts" in text
