"""Large merges of bfloat16 run on the stored bits; they give what small merges give."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import isthmus
from isthmus.engine import plan as planning
from isthmus.engine import worker
from isthmus.errors import NonFiniteError

from .models import WIDTH, contents, family, recipe, refused, write_model


@pytest.fixture
def models(tmp_path):
    return family(tmp_path / "models", dtype=torch.bfloat16)


@pytest.fixture
def calls(monkeypatch):
    """Treat every merge as a large one, and count the chunks that were merged on bits."""
    made = []
    compiled = worker.weighted_sum_of_bfloat16

    def counted(codes, weighted, merged):
        made.append(merged.size)
        return compiled(codes, weighted, merged)

    monkeypatch.setattr(planning, "COMPILER_PAYS", 0)
    monkeypatch.setattr(worker, "weighted_sum_of_bfloat16", counted)
    return made


def with_adapter(base, folder):
    """The base's name with an adapter of q_proj in its first layer."""
    draw = torch.Generator().manual_seed(9)
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    folder.mkdir()
    save_file(
        {
            f"{module}.lora_A.weight": torch.randn(2, WIDTH, generator=draw),
            f"{module}.lora_B.weight": torch.randn(WIDTH, 2, generator=draw),
        },
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return f"{base}+{folder}"


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("parameters", [{}, {"normalize": False}, {"weight": 0.3}])
def test_the_same_bytes(models, tmp_path, calls, monkeypatch, parameters):
    content = recipe("linear", models[1:], parameters=parameters)
    isthmus.merge(content, tmp_path / "bits")
    assert calls
    monkeypatch.setattr(planning, "COMPILER_PAYS", 10**12)
    count = len(calls)
    isthmus.merge(content, tmp_path / "numbers")
    assert len(calls) == count
    assert weights(tmp_path / "bits") == weights(tmp_path / "numbers")


def test_the_same_bytes_with_an_adapter_whose_update_is_not_rounded_first(
    models, tmp_path, calls, monkeypatch
):
    adapted = with_adapter(models[0], tmp_path / "adapter")
    content = recipe("linear", [adapted, models[1]])
    isthmus.merge(content, tmp_path / "bits")
    assert len(calls) == len(load_file(models[1] / "model.safetensors")) - 1
    monkeypatch.setattr(planning, "COMPILER_PAYS", 10**12)
    isthmus.merge(content, tmp_path / "numbers")
    assert weights(tmp_path / "bits") == weights(tmp_path / "numbers")


@pytest.mark.parametrize("other", ["output", "input", "method"])
def test_only_where_it_gives_the_same(models, tmp_path, calls, other):
    content = recipe("linear", models[1:])
    if other == "output":
        content["out_dtype"] = "float16"
    elif other == "input":
        wide = {k: v.float() for k, v in load_file(models[1] / "model.safetensors").items()}
        content = recipe("linear", [write_model(tmp_path / "wide", wide), models[2]])
        content["out_dtype"] = "bfloat16"
    else:
        content = recipe("task_arithmetic", models[1:], models[0])
    isthmus.merge(content, tmp_path / "out")
    assert not calls


@pytest.mark.usefixtures("calls")
def test_not_finite_numbers_are_named(models, tmp_path):
    state = load_file(models[2] / "model.safetensors")
    state["model.norm.weight"][3] = torch.nan
    broken = write_model(tmp_path / "broken", state)
    content = recipe("linear", [models[1], broken])
    message = refused(content, tmp_path / "out", NonFiniteError)
    assert "broken" in message
    assert "model.norm.weight" in message
    isthmus.merge(content, tmp_path / "allowed", allow_nonfinite=True)
    assert load_file(tmp_path / "allowed/model.safetensors")["model.norm.weight"][3].isnan()


@pytest.mark.usefixtures("calls")
def test_overflow_is_named(models, tmp_path):
    state = load_file(models[1] / "model.safetensors")
    state["model.norm.weight"][3] = torch.finfo(torch.bfloat16).max
    large = write_model(tmp_path / "large", state)
    content = recipe("linear", [large, large], parameters={"normalize": False})
    message = refused(content, tmp_path / "out", NonFiniteError)
    assert "overflows bfloat16" in message


@pytest.mark.usefixtures("calls")
def test_workers_do_not_matter(models, tmp_path):
    content = recipe("linear", models[1:])
    for workers in (1, 2):
        isthmus.merge(content, tmp_path / str(workers), workers=workers)
    one, two = contents(tmp_path / "1"), contents(tmp_path / "2")
    assert one["model.safetensors"] == two["model.safetensors"]
