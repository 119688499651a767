"""The merged network beside its experts, against whole networks that run each example alone."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from isthmus.checkpoints import open_checkpoint
from isthmus.checkpoints.memory import MemoryCheckpoint
from isthmus.errors import CalibrationError
from isthmus.models.layers import linear_layers
from isthmus.models.lockstep import run_in_lockstep

from .networks import LAYERS, NAMES, build, images, padded, saved, sequences

LENGTHS = ((3, 9, 5), (7, 1, 4, 4), (8,))
"""Of the examples of three experts."""


@pytest.fixture
def opened():
    checkpoints = []

    def open_them(*folders):
        checkpoints.extend(open_checkpoint(str(folder)) for folder in folders)
        return checkpoints[-len(folders) :]

    yield open_them
    for checkpoint in checkpoints:
        checkpoint.close()


def in_memory(folder):
    """A checkpoint of tensors that change, and these."""
    state = load_file(folder / "model.safetensors")
    checkpoint = MemoryCheckpoint("the merge", state)
    checkpoint.config = json.loads((folder / "config.json").read_text())
    return checkpoint, state


def examples(name, number):
    """Batches with padding, and each example alone."""
    if name == "vit":
        rows = images(2 + number)
        return [{"pixel_values": part} for part in rows.split(2)], [
            {"pixel_values": row[None]} for row in rows
        ]
    rows = sequences(number, LENGTHS[number])
    return padded(rows), [{"input_ids": row[None]} for row in rows]


def inputs(network, alone):
    """The inputs of every linear layer, with a constant, by the module's name; each example alone."""
    found, hooks = {}, []

    def hook(name):
        def listen(_module, arguments):
            rows = arguments[0].detach().double().numpy().reshape(-1, arguments[0].shape[-1])
            found.setdefault(name, []).append(np.pad(rows, [(0, 0), (0, 1)], constant_values=1))

        return listen

    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) or "Conv1D" in str(type(module)):
            hooks.append(module.register_forward_pre_hook(hook(name)))
    with torch.no_grad():
        for one in alone:
            network(**one)
    for handle in hooks:
        handle.remove()
    return {name: np.concatenate(rows) for name, rows in found.items()}


def module_of(folder, network):
    """The module of every stored weight of a linear layer, found by its numbers."""
    return {
        key: name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) or "Conv1D" in str(type(module))
        for key, tensor in load_file(folder / "model.safetensors").items()
        if tensor.shape == module.weight.shape and torch.equal(tensor, module.weight)
    }


def same(found, expected):
    # Sums have the order of the network's own rounding, in which rows with padding differ.
    assert np.linalg.norm(found.numpy() - expected) / np.linalg.norm(expected) < 1e-5


def nothing(_shared):
    pass


@pytest.mark.parametrize("name", NAMES)
def test_moments_are_those_of_whole_networks_at_every_step(tmp_path, opened, name):
    base = saved(tmp_path / "base", name)
    folders = [saved(tmp_path / f"expert-{k}", name, seed=k + 1) for k in range(3)]
    batches, alone = zip(*[examples(name, k) for k in range(3)], strict=True)
    merged, state = in_memory(base)
    modules = module_of(base, build(name))
    of_experts = [inputs(build(name, k + 1), alone[k]) for k in range(3)]
    solved = []

    def solve(shared):
        save_file(state, base / "model.safetensors", {"format": "pt"})
        network = type(build(name)).from_pretrained(base, dtype=torch.float32).eval()
        for k in range(3):
            of_merged = inputs(network, alone[k])
            for layer in shared.layers:
                module = modules[layer.weight]
                x_m, x_e = of_merged[module], of_experts[k][module]
                assert shared.merged[k].count == shared.expert[k].count == len(x_m)
                same(shared.merged[k].gram, x_m.T @ x_m)
                same(shared.expert[k].gram, x_e.T @ x_e)
                same(shared.cross[k], x_e.T @ x_m)
        for number, layer in enumerate(shared.layers):
            # What comes later must see this.
            state[layer.weight].mul_(-1.5 - number)
            if layer.bias is not None:
                state[layer.bias].add_(1)
            solved.append(layer)

    run_in_lockstep(merged, opened(*folders), batches, solve)
    assert sorted(solved, key=str) == sorted(linear_layers(merged), key=str)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_an_expert_beside_itself(tmp_path, opened, name):
    (expert,) = opened(saved(tmp_path, name))
    groups = []
    run_in_lockstep(expert, [expert], [examples(name, 0)[0]], groups.append)
    assert len(groups) > 3 * LAYERS
    for shared in groups:
        assert torch.equal(shared.merged[0].gram, shared.expert[0].gram)
        torch.testing.assert_close(shared.cross[0], shared.expert[0].gram)


def weights(groups):
    return [[layer.weight for layer in shared.layers] for shared in groups]


def test_layers_come_in_the_order_in_which_they_run(tmp_path, opened):
    (model,) = opened(saved(tmp_path, "llama"))
    groups = []
    run_in_lockstep(model, [model], [examples("llama", 0)[0]], groups.append)
    expected = []
    for number in range(LAYERS):
        attention, mlp = (f"model.layers.{number}.{part}" for part in ("self_attn", "mlp"))
        expected += [[f"{attention}.{part}_proj.weight" for part in "qkv"]]
        expected += [[f"{attention}.o_proj.weight"]]
        expected += [[f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"]]
        expected += [[f"{mlp}.down_proj.weight"]]
    assert weights(groups) == [*expected, ["lm_head.weight"]]


def test_heads_that_experts_do_not_share_are_left_out(tmp_path, opened):
    base, expert = saved(tmp_path / "base", "bert_masked"), saved(tmp_path / "expert", "bert", 1)
    groups = []
    run_in_lockstep(*opened(base), opened(expert), [examples("bert", 0)[0]], groups.append)
    assert len(groups) == 4 * LAYERS
    assert all(".layer." in name for group in weights(groups) for name in group)


def test_a_layer_that_no_input_reaches_is_no_group(tmp_path, opened, monkeypatch):
    from transformers.models.bert.modeling_bert import BertPooler

    monkeypatch.setattr(BertPooler, "forward", lambda _self, hidden: hidden[:, 0])
    (model,) = opened(saved(tmp_path, "bert"))
    groups = []
    run_in_lockstep(model, [model], [examples("bert", 0)[0]], groups.append)
    assert weights(groups)[-1] == ["classifier.weight"]
    assert len(groups) == 4 * LAYERS + 1


def test_one_block_of_each_network_or_what_is_outside_in_two_is_in_memory(tmp_path, opened):
    network = build("llama")
    block = sum(p.numel() for p in network.model.layers[0].parameters())
    outside = sum(p.numel() for p in network.parameters()) - LAYERS * block
    del network
    folders = [saved(tmp_path / str(k), "llama", k) for k in range(4)]
    gc.collect()
    before = {id(o) for o in gc.get_objects() if type(o) is nn.Parameter}
    held = []

    def count(*_):
        parameters = [o for o in gc.get_objects() if type(o) is nn.Parameter]
        held.append(sum(p.numel() for p in parameters if not p.is_meta and id(p) not in before))

    merged, *experts = opened(*folders)
    batches = [examples("llama", k)[0] for k in range(3)]

    run_in_lockstep(merged, experts, batches, count)
    assert held == [4 * block] * 4 * LAYERS + [outside]


def test_progress_ends_at_its_total(tmp_path, opened):
    (model,) = opened(saved(tmp_path, "llama"))
    told = []
    batches = [examples("llama", k)[0] for k in range(2)]
    run_in_lockstep(model, [model] * 2, batches, nothing, report=lambda *step: told.append(step))
    total = sum(map(len, batches)) * (LAYERS + 1)
    assert told == [(done, total) for done in range(1, total + 1)]


def test_what_solve_raises_comes_out_and_the_network_is_left_alone(tmp_path, opened):
    class Stop(Exception):
        pass

    def stop(_shared):
        raise Stop

    (model,) = opened(saved(tmp_path, "llama"))
    with pytest.raises(Stop):
        run_in_lockstep(model, [model], [examples("llama", 0)[0]], stop)


@pytest.mark.parametrize("batches", [[], [[]], [[{"input_ids": torch.ones(1, 2).long()}]] * 2])
def test_missing_examples(tmp_path, opened, batches):
    (model,) = opened(saved(tmp_path, "llama"))
    with pytest.raises(CalibrationError, match="not examples for every expert"):
        run_in_lockstep(model, [model], batches, nothing)


def test_experts_of_another_depth(tmp_path, opened):
    base = saved(tmp_path / "base", "llama")
    deeper = saved(tmp_path / "deeper", "llama", num_hidden_layers=4)
    with pytest.raises(CalibrationError, match=r"deeper has 4 blocks; .*base has 3"):
        run_in_lockstep(*opened(base), opened(deeper), [examples("llama", 0)[0]], nothing)


def test_experts_of_another_architecture(tmp_path, opened):
    base, other = saved(tmp_path / "base", "llama"), saved(tmp_path / "other", "gpt2")
    with pytest.raises(CalibrationError, match=r"other has no linear layer .*q_proj"):
        run_in_lockstep(*opened(base), opened(other), [examples("llama", 0)[0]], nothing)


def test_overflow_names_the_model_and_the_layer(tmp_path, opened):
    base, expert = saved(tmp_path / "base", "llama"), saved(tmp_path / "expert", "llama")
    state = load_file(expert / "model.safetensors")
    state["model.layers.1.post_attention_layernorm.weight"][:] = 3e38
    save_file(state, expert / "model.safetensors", {"format": "pt"})
    with pytest.raises(CalibrationError, match=r"expert: model\.layers\.1\.mlp\.gate.*NaN"):
        run_in_lockstep(*opened(base), opened(expert), [examples("llama", 0)[0]], nothing)


def test_a_layer_that_runs_twice(tmp_path, opened, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    once = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: once(self, once(self, x)))
    (model,) = opened(saved(tmp_path, "llama"))
    with pytest.raises(CalibrationError, match="gate_proj runs twice"):
        run_in_lockstep(model, [model], [examples("llama", 0)[0]], nothing)
