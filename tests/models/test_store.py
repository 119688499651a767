"""Stored moments: the same numbers again, and only for what they are of."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from isthmus.checkpoints import open_checkpoint
from isthmus.errors import CalibrationError, OutputError
from isthmus.models.calibration import calibrate
from isthmus.models.states import Keep
from isthmus.models.store import StoredMoments, store_moments

from .networks import padded, saved, sequences


@pytest.fixture
def model(tmp_path):
    return saved(tmp_path / "model", "llama")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "deep" / "moments"


def store(model, out, batches=None, **options):
    with open_checkpoint(str(model)) as checkpoint:
        return store_moments(checkpoint, batches or padded(sequences()), out, **options)


def refused(kind, *arguments, **options):
    with pytest.raises(kind) as caught:
        store(*arguments, **options)
    return str(caught.value)


def test_what_is_read_is_what_was_computed(model, out):
    stored, computed = store(model, out)
    assert computed
    expected = calibrate(str(model), padded(sequences()))
    assert set(stored) == set(expected)
    for weight, moments in expected.items():
        assert torch.equal(stored[weight].gram, moments.gram)
        assert stored[weight].count == moments.count
    assert [path.name for path in out.parent.iterdir()] == ["moments"]


def test_moments_in_common_are_stored_once(model, out):
    stored, _ = store(model, out)
    tensors = [name for path in out.glob("*.safetensors") for name in load_file(path)]
    assert len(tensors) == len(set(tensors)) < len(stored)


def test_they_are_used_again(model, out):
    store(model, out)
    told = []
    stored, computed = store(model, out, report=lambda *step: told.append(step))
    assert not computed
    assert not told
    assert stored.keys() == StoredMoments(out).keys()


def test_other_examples_are_refused(model, out):
    store(model, out)
    assert "of other examples" in refused(CalibrationError, model, out, padded(sequences(1)))


def test_another_model_is_refused(model, out, tmp_path):
    store(model, out)
    other = saved(tmp_path / "other", "llama", seed=1)
    assert "of another model" in refused(CalibrationError, other, out)


def test_a_model_can_be_required_alone(model, out, tmp_path):
    stored, _ = store(model, out, padded(sequences(1)))
    with open_checkpoint(str(model)) as checkpoint:
        stored.require_model(checkpoint)
    with (
        open_checkpoint(str(saved(tmp_path / "other", "llama", seed=1))) as other,
        pytest.raises(CalibrationError, match=r"of another model than .*other"),
    ):
        stored.require_model(other)


def test_another_configuration_is_another_model(model, out):
    store(model, out)
    config = json.loads((model / "config.json").read_text()) | {"rms_norm_eps": 0.1}
    (model / "config.json").write_text(json.dumps(config))
    assert "of another model" in refused(CalibrationError, model, out)


def test_a_copy_of_the_model_is_the_same_model(model, out, tmp_path):
    store(model, out)
    state = load_file(model / "model.safetensors")
    copy = saved(tmp_path / "copy", "llama", seed=1)
    (copy / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(state, copy / "model.safetensors", {"format": "pt"})
    assert not store(copy, out)[1]


def test_other_settings_are_refused(model, out):
    store(model, out)
    assert "of other settings" in refused(CalibrationError, model, out, keep=Keep.BFLOAT16)


def test_a_failure_leaves_nothing(model, out):
    class Stop(Exception):
        pass

    def stop(done, _total):
        if done == 5:
            raise Stop

    refused(Stop, model, out, report=stop)
    assert not list(out.parent.iterdir())


def test_what_is_not_ours_stays(model, out):
    out.mkdir(parents=True)
    (out / "thesis.txt").write_text("mine")
    assert "holds no calibration statistics" in refused(OutputError, model, out)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]


def test_an_empty_folder_will_do(model, out):
    out.mkdir(parents=True)
    assert store(model, out)[1]


def test_a_folder_that_cannot_be_written(model, tmp_path):
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(OutputError, model, tmp_path / "file" / "out")


def test_no_statistics(tmp_path):
    with pytest.raises(CalibrationError, match="isthmus calibrate"):
        StoredMoments(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2}', '{"format": 2, "key": {}}'])
def test_a_damaged_description(tmp_path, content):
    (tmp_path / "calibration.json").write_text(content)
    with pytest.raises(CalibrationError, match="is damaged"):
        StoredMoments(tmp_path)


@pytest.mark.parametrize("number", [1, 3])
def test_another_format(tmp_path, number):
    (tmp_path / "calibration.json").write_text(f'{{"format": {number}}}')
    with pytest.raises(CalibrationError, match=f"of format {number}"):
        StoredMoments(tmp_path)


def test_a_truncated_or_changed_part(model, out):
    stored, _ = store(model, out)
    weight = next(iter(stored))
    part = out / "part-00000.safetensors"
    content = part.read_bytes()
    part.write_bytes(content[:-1])
    with pytest.raises(CalibrationError, match=r"part-00000.*\n.*run isthmus calibrate again"):
        stored[weight]
    save_file({"other": torch.zeros(2)}, part)
    with pytest.raises(CalibrationError, match=r"no square matrix model\.layers\.0"):
        stored[weight]
    part.unlink()
    with pytest.raises(CalibrationError, match=r"part-00000.*\n.*run isthmus calibrate again"):
        stored[weight]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1.0])
def test_a_matrix_whose_constant_does_not_count(value, model, out):
    stored, _ = store(model, out)
    weight = next(iter(stored))
    part = out / "part-00000.safetensors"
    grams = load_file(part)
    grams[weight][-1, -1] = value
    save_file(grams, part)
    with pytest.raises(CalibrationError, match=f"part-00000.safetensors: the matrix {weight}"):
        stored[weight]


@pytest.mark.parametrize("count", [0, -5, 1_000_000])
def test_another_number_of_inputs(count, model, out):
    stored, _ = store(model, out)
    weight = next(iter(stored))
    described = json.loads((out / "calibration.json").read_text())
    described["weights"][weight]["count"] = count
    (out / "calibration.json").write_text(json.dumps(described))
    with pytest.raises(CalibrationError, match=f"is not one of {count} inputs"):
        StoredMoments(out)[weight]


def test_files_outside_the_folder_are_not_read(model, out):
    stored, _ = store(model, out)
    weight = next(iter(stored))
    (out / "part-00000.safetensors").rename(out.parent / "part-00000.safetensors")
    described = json.loads((out / "calibration.json").read_text())
    described["weights"][weight]["file"] = "../part-00000.safetensors"
    (out / "calibration.json").write_text(json.dumps(described))
    with pytest.raises(CalibrationError, match="cannot be opened"):
        StoredMoments(out)[weight]
