"""Adapters that are written: PEFT loads them and merges what was meant."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.checkpoints import Dtype, TensorInfo, open_adapter
from isthmus.checkpoints.adapter_format import ModuleUpdate, adapter_config, adapter_tensors
from isthmus.errors import PlanError

from .files import save
from .test_adapter import bert, gpt2, llama, resnet

pytestmark = pytest.mark.filterwarnings("ignore")

DRAW = np.random.default_rng(0)


def draw(info: TensorInfo) -> np.ndarray:
    return DRAW.standard_normal(info.shape).astype(np.float32)


def update_of(model: torch.nn.Module, name: str, rank: int, *, bias: bool = False) -> ModuleUpdate:
    """What LoRA of a module looks like, by torch's own description of it."""
    module = model.get_submodule(name)
    shape = tuple(module.weight.shape)
    embedding = isinstance(module, torch.nn.Embedding)
    kernel = shape[2:] or None
    outputs, inputs = shape[0], int(np.prod(shape[1:]))
    if embedding or type(module).__name__ == "Conv1D":
        outputs, inputs = inputs, outputs
    return ModuleUpdate(name, rank, (outputs, inputs), kernel, embedding, bias)


def write(
    folder: Path,
    model: torch.nn.Module,
    updates: Sequence[ModuleUpdate],
    replaced: Sequence[TensorInfo] = (),
    whole: Sequence[str] = (),
    **donor: Any,
) -> dict[str, torch.Tensor]:
    """An adapter of random numbers; returns what the model becomes with it."""
    stored = adapter_tensors(updates, replaced, Dtype.F32)
    tensors: dict[str, np.ndarray] = {}
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for update in updates:
        factors = stored.of_module(update)
        a, b = draw(factors.a), draw(factors.b)
        tensors |= {factors.a.name: a, factors.b.name: b}
        delta = torch.from_numpy(b.reshape(b.shape[0], -1) @ a.reshape(a.shape[0], -1))
        weight = expected[f"{update.module}.weight"]
        transposed = update.embedding or (
            type(model.get_submodule(update.module)).__name__ == "Conv1D"
        )
        weight += delta.mT if transposed else delta.reshape(weight.shape)
        if factors.bias is not None:
            tensors[factors.bias.name] = draw(factors.bias)
            expected[f"{update.module}.bias"] += torch.from_numpy(tensors[factors.bias.name])
    for info in replaced:
        place = stored.of_tensor(info)
        assert (place.dtype, place.shape) == (info.dtype, info.shape)
        tensors[place.name] = draw(place)
        expected[info.name] = torch.from_numpy(tensors[place.name])
    save(folder / "adapter_model.safetensors", tensors, metadata={"format": "pt"})
    (folder / "adapter_config.json").write_text(adapter_config(donor, updates, whole))
    return expected


def merged(model: torch.nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    from peft import PeftModel

    wrapped = PeftModel.from_pretrained(copy.deepcopy(model), folder)
    wrapped = wrapped.merge_and_unload()
    return dict(wrapped.state_dict())


def check(model: torch.nn.Module, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = merged(model, folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


LAYER = "model.layers.0"


def test_mixed_ranks(tmp_path: Path) -> None:
    model = llama()
    updates = [
        update_of(model, f"{LAYER}.self_attn.q_proj", 2),
        update_of(model, f"{LAYER}.mlp.down_proj", 5),
        update_of(model, "model.layers.1.self_attn.q_proj", 7),
        update_of(model, "model.layers.1.mlp.down_proj", 2),
        update_of(model, "model.embed_tokens", 3),
    ]
    check(model, tmp_path, write(tmp_path, model, updates))
    found = open_adapter(tmp_path).updates
    assert {name: (u.rank, u.scaling, u.shape) for name, u in found.items()} == {
        u.module: (u.rank, 1.0, u.shape) for u in updates
    }
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == config["lora_alpha"] == 2
    assert config["rank_pattern"] == config["alpha_pattern"]
    assert len(config["rank_pattern"]) == 3


def test_conv1d_layers_and_embeddings(tmp_path: Path) -> None:
    model = gpt2()
    names = ("attn.c_attn", "attn.c_proj", "mlp.c_fc")
    updates = [update_of(model, f"transformer.h.1.{name}", 3) for name in names]
    updates.append(update_of(model, "transformer.wpe", 2))
    check(model, tmp_path, write(tmp_path, model, updates, fan_in_fan_out=True))


def test_convolutions(tmp_path: Path) -> None:
    model = resnet().eval()
    updates = [
        update_of(model, name, 2 + number % 2)
        for number, (name, module) in enumerate(model.named_modules())
        if isinstance(module, torch.nn.Conv2d)
    ]
    assert {update.kernel for update in updates} == {(1, 1), (3, 3), (7, 7)}
    check(model, tmp_path, write(tmp_path, model, updates))


def test_biases_of_lora(tmp_path: Path) -> None:
    model = bert()
    stem = "bert.encoder.layer.0.attention.self"
    updates = [update_of(model, f"{stem}.{x}", 2, bias=True) for x in ("query", "key")]
    check(model, tmp_path, write(tmp_path, model, updates))


def test_whole_modules_and_trained_biases(tmp_path: Path) -> None:
    model = bert()
    stem = "bert.encoder.layer.0.attention"
    replaced = [
        TensorInfo(name, Dtype.F32, tuple(model.get_parameter(name).shape))
        for name in (
            f"{stem}.self.query.bias",  # inside of a module with LoRA
            f"{stem}.output.LayerNorm.weight",
            f"{stem}.output.LayerNorm.bias",
            "classifier.weight",
            "classifier.bias",
        )
    ]
    expected = write(
        tmp_path,
        model,
        [update_of(model, f"{stem}.self.query", 2)],
        replaced,
        ["classifier", f"{stem}.output.LayerNorm"],
    )
    check(model, tmp_path, expected)


class Odd(torch.nn.Module):
    """Modules whose names mean something else as regular expressions, or end alike."""

    def __init__(self) -> None:
        super().__init__()
        names = ("a+b", "aab", "x(1|2)", "x1", "b")
        self.inner = torch.nn.ModuleDict({name: torch.nn.Linear(6, 5) for name in names})
        self.b = torch.nn.Linear(6, 5)


def test_patterns_fit_one_module_each(tmp_path: Path) -> None:
    model = Odd()
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    updates = [update_of(model, name, 1 + number % 5) for number, name in enumerate(names)]
    check(model, tmp_path, write(tmp_path, model, updates))
    found = open_adapter(tmp_path).updates
    assert {name: u.rank for name, u in found.items()} == {u.module: u.rank for u in updates}


def test_the_donor_says_where_the_adapter_belongs() -> None:
    donor = {
        "base_model_name_or_path": "org/base", "task_type": "CAUSAL_LM", "r": 64, "use_rslora": True,
        "lora_alpha": 3, "rank_pattern": {"x": 1}, "layers_to_transform": [0], "use_dora": True,
        "fan_in_fan_out": True, "exclude_modules": ["x"],
    }  # fmt: skip
    config = json.loads(adapter_config(donor, [ModuleUpdate("x", 4, (2, 2))], []))
    assert config["base_model_name_or_path"] == "org/base"
    assert config["task_type"] == "CAUSAL_LM"
    assert config["fan_in_fan_out"] is True
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (4, 4, {})
    assert not config["use_rslora"]
    assert not config["use_dora"]
    assert "exclude_modules" not in config
    assert "layers_to_transform" not in config


def test_what_peft_cannot_hold_is_refused() -> None:
    with pytest.raises(PlanError, match="would change no module"):
        adapter_config({}, [], ["norm"])
    updates = [
        ModuleUpdate("x", 1, (2, 2), bias=True),
        ModuleUpdate("embed", 1, (2, 9), embedding=True),
    ]
    with pytest.raises(PlanError, match=r"lora_bias\) and update the embedding embed"):
        adapter_config({}, updates, [])
