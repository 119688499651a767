"""Projection of LoRA adapters: what is written is an adapter, in the span of the given ones."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import isthmus
from isthmus.errors import PlanError
from tests.models.networks import add_tokenizer, build

from .models import WORDS, inputs, texts

RANKS = {"one": 2, "two": 3}
TARGETS = {"bert": ["query", "value", "dense"], "gpt2": ["c_attn", "c_proj"]}


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """By kind: a base, two adapters of PEFT's, and the same applied to the base in full."""
    from peft import LoraConfig, get_peft_model

    root = tmp_path_factory.mktemp("adapters")
    for kind, targets in TARGETS.items():
        build(kind).save_pretrained(root / kind / "base")
        add_tokenizer(root / kind / "base", WORDS)
        for seed, (name, rank) in enumerate(RANKS.items()):
            config = LoraConfig(
                r=rank, lora_alpha=4, target_modules=targets, fan_in_fan_out=kind == "gpt2"
            )
            model = get_peft_model(build(kind), config)
            draw = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if "lora" in key:
                        parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
            model.save_pretrained(root / kind / name)
            model.merge_and_unload().save_pretrained(root / kind / f"{name}-full")
    for seed, name in enumerate(RANKS):
        lines = [json.dumps({"text": text}) for text in texts(seed)]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
    return root


def recipe(root, kind="bert", ending="", **more) -> dict:
    parameters = more.pop("parameters", {})
    return {
        "merge_method": "projection",
        "base_model": str(root / kind / "base"),
        "models": [
            {
                "model": str(root / kind / f"{name}{ending}"),
                "calibration": str(root / f"{name}.jsonl"),
            }
            for name in RANKS
        ],
        "parameters": parameters,
        "calibration": {"tokens": 16},
    } | more


def applied(kind, adapter):
    from peft import PeftModel

    return PeftModel.from_pretrained(build(kind), adapter).merge_and_unload()


@pytest.mark.parametrize("kind", list(TARGETS))
@pytest.mark.parametrize("basis", ["scalar", "diagonal", "columns"])
@pytest.mark.parametrize("sequential", [False, True])
def test_the_adapter_is_what_whole_models_give(kind, basis, sequential, family, tmp_path):
    """The same task vectors, written in full, are merged to the same weights."""
    parameters = {"basis": basis, "sequential": sequential}
    isthmus.merge(recipe(family, kind, parameters=parameters), tmp_path / "adapter")
    full = recipe(family, kind, "-full", parameters=parameters)
    isthmus.merge(full, tmp_path / "full")
    ours = applied(kind, tmp_path / "adapter").state_dict()
    theirs = load_file(tmp_path / "full" / "model.safetensors")
    base = load_file(family / kind / "base" / "model.safetensors")
    changed = 0
    for name, tensor in theirs.items():
        moved = (tensor - base[name]).norm()
        changed += bool(moved)
        assert (ours[name] - tensor).norm() <= 0.02 * moved + 1e-5, name
    assert changed > 5
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == sum(RANKS.values())
    assert (tmp_path / "adapter" / "projection.json").exists()


def test_the_networks_own_output_as_objective(family, tmp_path):
    parameters = {"objective": "network", "basis": "blocks", "sweeps": 1}
    isthmus.merge(recipe(family, parameters=parameters), tmp_path / "adapter")
    isthmus.merge(recipe(family, ending="-full", parameters=parameters), tmp_path / "full")
    ours = applied("bert", tmp_path / "adapter").state_dict()
    base = load_file(family / "bert" / "base" / "model.safetensors")
    for name, tensor in load_file(tmp_path / "full" / "model.safetensors").items():
        moved = (tensor - base[name]).norm()
        assert (ours[name] - tensor).norm() <= 0.02 * moved + 1e-5, name


def test_a_rank_is_cut_to(family, tmp_path):
    isthmus.merge(recipe(family, rank=2), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["r"] == 2
    outcome = isthmus.merge(recipe(family, rank=2), tmp_path / "again")
    assert any("energy" in note and "rank" in note for note in outcome.notes)


def test_output_full_is_the_adapter_on_its_base(family, tmp_path):
    isthmus.merge(recipe(family), tmp_path / "adapter")
    isthmus.merge(recipe(family, output="full"), tmp_path / "full")
    ours = load_file(tmp_path / "full" / "model.safetensors")
    for name, tensor in applied("bert", tmp_path / "adapter").state_dict().items():
        if name in ours:
            torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)


def test_one_adapter_comes_back(family, tmp_path):
    made = recipe(family)
    made["models"] = made["models"][:1]
    isthmus.merge(made, tmp_path / "out")
    merged = applied("bert", tmp_path / "out")
    expert = applied("bert", family / "bert" / "one")
    for example in inputs(0):
        np.testing.assert_allclose(
            merged(**example).logits.detach(), expert(**example).logits.detach(), atol=2e-3
        )


@pytest.mark.parametrize("basis", ["elementwise", "optimal"])
def test_bases_that_leave_the_span(basis, family, tmp_path):
    with pytest.raises(PlanError, match="leaves the span of the adapters"):
        isthmus.merge(recipe(family, parameters={"basis": basis}), tmp_path / "out")


def test_without_a_base(family, tmp_path):
    made = recipe(family)
    del made["base_model"]
    with pytest.raises(PlanError, match="base_model"):
        isthmus.merge(made, tmp_path / "out")


def test_regmean_does_not_stay_in_the_span(family, tmp_path):
    with pytest.raises(PlanError, match="regmean does not merge adapters"):
        isthmus.merge(recipe(family, merge_method="regmean"), tmp_path / "out")
