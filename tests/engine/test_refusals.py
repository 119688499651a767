"""Models, numbers and files that cannot be merged: an error names tensor, model and cure."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import isthmus
from isthmus.engine.verify import verify
from isthmus.errors import (
    CheckpointError,
    NonFiniteError,
    OutputError,
    PlanError,
    RecipeError,
)

from .models import llama_state, recipe, refused, write_model


def test_a_shape_that_differs(models, tmp_path):
    state = load_file(models[2] / "model.safetensors")
    state["lm_head.weight"] = torch.zeros(41, 16)
    write_model(models[2], state)
    message = refused(recipe("ties", models[1:], models[0]), tmp_path / "out", PlanError)
    for part in ("lm_head.weight", "[41, 16]", "[40, 16]", "expert2", "base"):
        assert part in message
    assert not (tmp_path / "out").exists()


def test_a_missing_and_an_extra_tensor(models, tmp_path):
    state = load_file(models[1] / "model.safetensors")
    del state["model.norm.weight"]
    state["score.weight"] = torch.zeros(3)
    write_model(models[1], state)
    message = refused(recipe("ties", models[1:], models[0]), tmp_path / "out", PlanError)
    assert "model.norm.weight is in" in message
    assert "score.weight is in" in message
    assert "expert1" in message
    assert "tensors: common" in message


def test_models_without_anything_in_common(models, tmp_path):
    other = write_model(tmp_path / "other", {"x": torch.zeros(2)})
    content = recipe("linear", [models[0], other], tensors="common")
    assert "shares no tensor" in refused(content, tmp_path / "out", PlanError)


def test_a_base_that_is_absent(models, tmp_path):
    assert "base_model" in refused(recipe("ties", models[1:]), tmp_path / "out", RecipeError)


def test_weights_that_sum_to_zero(models, tmp_path):
    content = recipe("linear", models[1:3])
    content["models"][0]["parameters"] = {
        "weight": [{"filter": "norm", "value": -1}, {"value": 1.0}]
    }
    message = refused(content, tmp_path / "out", PlanError)
    assert "norm" in message
    assert "sum to zero" in message
    assert "normalize: false" in message


@pytest.mark.parametrize("density", [0, -0.1, 1.5, float("nan")])
def test_a_density_out_of_range(models, tmp_path, density):
    content = recipe("ties", models[1:], models[0], parameters={"density": density})
    assert "density" in refused(content, tmp_path / "out", RecipeError)


def test_a_gradient_of_zero_length(models, tmp_path):
    content = recipe("ties", models[1:], models[0], parameters={"density": []})
    assert "density" in refused(content, tmp_path / "out", RecipeError)


def test_a_vocabulary_that_differs_is_noted(models, tmp_path):
    for number, model in enumerate(models):
        (model / "vocab.txt").write_text("\n".join(["a", "b", "c"][:: -1 if number == 2 else 1]))
    outcome = isthmus.merge(recipe("ties", models[1:], models[0]), tmp_path / "out")
    noted = [note for note in outcome.notes if "tokens" in note]
    assert len(noted) == 1
    assert "2 tokens" in noted[0]
    assert "expert2" in noted[0]


def test_a_filter_that_names_no_tensor_is_noted(models, tmp_path):
    content = recipe("linear", models[1:])
    content["models"][0]["parameters"] = {
        "weight": [{"filter": "self_atn", "value": 0.5}, {"value": 1.0}]
    }
    outcome = isthmus.merge(content, tmp_path / "out")
    assert any("self_atn" in note for note in outcome.notes)


# Numbers


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("method", ["linear", "ties", "dare_linear", "slerp", "passthrough"])
def test_a_number_that_is_not_finite(models, tmp_path, method, value):
    state = load_file(models[1] / "model.safetensors")
    state["model.layers.1.mlp.down_proj.weight"][3, 5] = value
    write_model(models[1], state)
    base = models[0] if method in ("ties", "dare_linear", "slerp") else None
    experts = models[1:2] if method in ("slerp", "passthrough") else models[1:]
    parameters = {"ties": {"density": 0.5}, "dare_linear": {"density": 0.5}, "slerp": {"t": 0.5}}
    content = recipe(method, experts, base, parameters=parameters.get(method, {}))
    message = refused(content, tmp_path / "out", NonFiniteError)
    for part in ("expert1", "model.layers.1.mlp.down_proj.weight", "(3, 5)", "--allow-nonfinite"):
        assert part in message
    isthmus.merge(content, tmp_path / "out", allow_nonfinite=True, overwrite=True)
    assert verify(tmp_path / "out").problems == ()


def test_a_result_that_overflows_its_format(models, tmp_path):
    content = recipe("linear", models[1:], out_dtype="float16", parameters={"normalize": False})
    for entry in content["models"]:
        entry["parameters"] = {"weight": 1e6}
    message = refused(content, tmp_path / "out", NonFiniteError)
    assert "float16" in message
    assert "bfloat16" in message


# Files


def test_a_missing_model_and_a_missing_shard(models, tmp_path):
    content = recipe("linear", [models[1], tmp_path / "models" / "expert22"])
    assert "expert22" in refused(content, tmp_path / "out", CheckpointError)
    (models[1] / "model.safetensors").unlink()
    (models[1] / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'
    )
    message = refused(recipe("linear", models[1:]), tmp_path / "out", CheckpointError)
    assert "model-00001-of-00002.safetensors" in message


def test_a_truncated_input(models, tmp_path):
    file = models[1] / "model.safetensors"
    os.truncate(file, file.stat().st_size - 10)
    message = refused(recipe("linear", models[1:]), tmp_path / "out", CheckpointError)
    assert "model.safetensors" in message


def test_an_input_that_changes_during_the_merge(models, tmp_path):
    file = models[1] / "model.safetensors"
    with isthmus.plan(recipe("linear", models[1:])) as plan:
        os.truncate(file, file.stat().st_size - 4000)
        from isthmus.api import run_plan

        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            run_plan(plan, tmp_path / "out")


def test_names_that_no_file_system_takes(ties, tmp_path, monkeypatch):
    with pytest.raises(OutputError, match="too long"):
        isthmus.merge(ties, tmp_path / ("x" * 300))
    isthmus.merge(ties, tmp_path / os.fsdecode(b"out\xff"))
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    from pathlib import Path

    with pytest.raises(OutputError, match="gone"):
        isthmus.merge(ties, Path("out"))


@pytest.mark.parametrize("device", ["meta", "nonsense", "cuda:99"])
def test_a_device_that_cannot_be_used(ties, tmp_path, device):
    message = refused(ties, tmp_path / "out", PlanError, device=device)
    assert device in message
    assert "--device cpu" in message


def test_without_a_place_for_compiled_code_it_is_compiled_anew(tmp_path):
    code = (
        "import numba\n"
        "real = numba.njit\n"
        "def njit(*functions, **options):\n"
        "    if options.get('cache'): raise RuntimeError('no locator available')\n"
        "    return real(*functions, **options)\n"
        "numba.njit = njit\n"
        "import numpy as np\n"
        "from isthmus.methods.kernels import count_digits\n"
        "counts = np.zeros(1 << 16, np.int64)\n"
        "count_digits(np.array([1.0], np.float32).view(np.uint32), np.uint32(2**31 - 1),"
        " np.uint32(16), np.uint32(0), counts)\n"
        "assert counts[0x3f80] == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_a_head_of_its_own_beside_a_tied_base_is_explained(tmp_path):
    tied = llama_state(0)
    del tied["lm_head.weight"]
    one = write_model(tmp_path / "tied", tied, tie_word_embeddings=True)
    two = write_model(tmp_path / "own", llama_state(1))
    message = refused(recipe("ties", [two], one), tmp_path / "out", PlanError)
    assert "lm_head.weight has numbers of its own" in message


def test_the_model_state_is_not_needed_beyond_a_few_chunks(tmp_path):
    """What the plan calls peak memory does not grow with layers, and with models by their chunks."""

    def peak(layers, models):
        states = [llama_state(seed, layers=layers) for seed in range(models)]
        root = tmp_path / f"{layers}-{models}"
        paths = [write_model(root / str(i), state) for i, state in enumerate(states)]
        with isthmus.plan(recipe("ties", paths[1:], paths[0])) as plan:
            return plan.peak_memory(1)

    assert peak(2, 3) == peak(8, 3)
    assert peak(2, 8) < 8 / 3 * peak(2, 3)


def test_a_parameter_without_effect_is_noted(models, tmp_path):
    content = recipe("task_arithmetic", models[1:], models[0], parameters={"density": 0.5})
    outcome = isthmus.merge(content, tmp_path / "out")
    assert any("density has no effect" in note for note in outcome.notes)
    plain = isthmus.merge(recipe("task_arithmetic", models[1:], models[0]), tmp_path / "plain")
    assert not any("no effect" in note for note in plain.notes)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "plain" / "model.safetensors"
    ).read_bytes()


def test_the_base_under_another_name_is_noted(models, tmp_path):
    content = recipe("ties", models[1:3], models[0])
    content["models"][1]["model"] = f"{models[0].parent}/../models/base"
    outcome = isthmus.merge(content, tmp_path / "out")
    assert any("under another name" in note for note in outcome.notes)
    plain = isthmus.merge(recipe("ties", models[1:], models[0]), tmp_path / "plain")
    assert not any("under another name" in note for note in plain.notes)
