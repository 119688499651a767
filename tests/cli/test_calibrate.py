"""`isthmus calibrate` as people use it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from isthmus.cli.main import app
from isthmus.errors import IsthmusError
from isthmus.models.store import StoredMoments

from ..models.networks import LAYERS, LONGEST, add_tokenizer, images, saved

WORDS = ("one", "two", "three", "plus", "is")


@pytest.fixture
def model(tmp_path):
    return add_tokenizer(saved(tmp_path / "model", "llama"), WORDS)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"text": " ".join(WORDS[: 1 + number % 5]), "id": number} for number in range(9)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)])


def refused(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert isinstance(result.exception, IsthmusError), result.output
    return str(result.exception)


def test_help_teaches():
    shown = invoke("--help").stdout
    assert "isthmus calibrate ./math --data problems.jsonl" in shown
    assert "No labels are needed" in shown


def test_texts_become_statistics_once(model, data, tmp_path):
    out = tmp_path / "stats"
    first = invoke(model, "--data", data, "-o", out, "--examples", 9)
    assert first.exit_code == 0, first.output
    assert f"inputs of {7 * LAYERS + 1} weights on 9 examples\n" in first.stdout
    tokens = sum(1 + number % 5 for number in range(9))
    assert {moments.count for moments in StoredMoments(out).values()} == {tokens}
    again = invoke(model, "--data", data, "-o", out)
    assert "complete already, nothing to do" in again.stdout


def test_another_seed_is_another_choice(model, data, tmp_path):
    out = tmp_path / "stats"
    assert not invoke(model, "--data", data, "-o", out, "--examples", 2).exit_code
    message = refused(model, "--data", data, "-o", out, "--examples", 2, "--seed", 1)
    assert "of other examples" in message


def test_a_column_that_is_not_there(model, data, tmp_path):
    message = refused(model, "--data", data, "-o", tmp_path / "o", "--column", "body")
    assert "no column 'body'; it has 'text', 'id'" in message
    assert not (tmp_path / "o").exists()


def test_texts_longer_than_the_model(model, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("one " * 30)
    message = refused(model, "--data", path, "-o", tmp_path / "o")
    assert f"--tokens {LONGEST}" in message
    assert not invoke(model, "--data", path, "-o", tmp_path / "o", "--tokens", LONGEST).exit_code


def test_a_model_without_a_tokenizer(data, tmp_path):
    folder = saved(tmp_path / "bare", "llama")
    message = refused(folder, "--data", data, "-o", tmp_path / "o")
    assert f"{folder} has no tokenizer" in message


def test_images_for_a_vision_model(tmp_path):
    folder = saved(tmp_path / "vit", "vit")
    pixels = (images().clamp(0, 1)[:, 0] * 255).byte().numpy()
    shape = b"".join(size.to_bytes(4, "big") for size in pixels.shape)
    path = tmp_path / "images-idx3-ubyte"
    path.write_bytes(b"\0\0\x08\x03" + shape + pixels.tobytes())
    result = invoke(folder, "--data", path, "-o", tmp_path / "o", "--examples", 3)
    assert "on 3 examples" in result.stdout, result.output
    # Four patches and the class token of each.
    query = "vit.encoder.layer.0.attention.attention.query.weight"
    assert StoredMoments(tmp_path / "o")[query].count == 15
