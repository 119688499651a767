"""Moments block by block, against a whole network that runs each example alone."""

from __future__ import annotations

import gc
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from isthmus.errors import CalibrationError, NonFiniteError
from isthmus.models.blocks import find_blocks, given_blocks
from isthmus.models.calibration import calibrate, calibrate_parts
from isthmus.models.states import Keep

from .networks import LAYERS, NAMES, VOCABULARY, build, images, padded, saved, sequences


def listened(network, inputs):
    """Σ xxᵀ, with a constant in x, and the number of x by module, from hooks on a plain forward pass."""
    grams, counts, hooks = {}, {}, []

    def hook(name):
        def listen(_module, arguments):
            rows = arguments[0].detach().double().numpy().reshape(-1, arguments[0].shape[-1])
            rows = np.pad(rows, [(0, 0), (0, 1)], constant_values=1)
            grams[name] = grams.get(name, 0) + np.einsum("ti,tj->ij", rows, rows)
            counts[name] = counts.get(name, 0) + len(rows)

        return listen

    for name, module in network.named_modules():
        if isinstance(module, nn.Linear) or "Conv1D" in str(type(module)):
            hooks.append(module.register_forward_pre_hook(hook(name)))
    with torch.no_grad():
        for one in inputs:
            network(**one)
    for handle in hooks:
        handle.remove()
    return grams, counts


def same(moments, gram, count):
    assert moments.count == count
    error = np.linalg.norm(moments.gram.numpy() - gram) / np.linalg.norm(gram)
    assert error < 1e-5


def stored_weights(folder, network):
    """The stored name of every layer's weight, found by its numbers."""
    stored = load_file(folder / "model.safetensors")
    return {
        name: key
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) or "Conv1D" in str(type(module))
        for key, tensor in stored.items()
        if tensor.shape == module.weight.shape and torch.equal(tensor, module.weight)
    }


def inputs_of(name):
    """Batches with padding, and each example alone."""
    if name == "vit":
        return [{"pixel_values": part} for part in images().split(2)], [
            {"pixel_values": one[None]} for one in images()
        ]
    rows = sequences()
    return padded(rows), [{"input_ids": row[None]} for row in rows]


@pytest.mark.parametrize("name", NAMES)
def test_blockwise_is_the_whole_network_on_examples_alone(tmp_path, name):
    folder, network = saved(tmp_path, name), build(name)
    batches, alone = inputs_of(name)
    grams, counts = listened(network, alone)
    found = calibrate(str(folder), batches)
    names = stored_weights(folder, network)
    assert set(found) == set(names.values())
    assert len(grams) == len(names)
    for layer, weight in names.items():
        same(found[weight], grams[layer], counts[layer])


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_order_and_grouping_of_examples_changes_nothing(tmp_path, name):
    folder, rows = saved(tmp_path, name), sequences()
    one = calibrate(str(folder), padded(rows, 6))
    other = calibrate(str(folder), padded(rows[::-1], 1))
    for weight, moments in one.items():
        same(other[weight], moments.gram.numpy(), moments.count)


def test_layers_with_one_input_share_its_moments(tmp_path):
    found = calibrate(str(saved(tmp_path, "llama")), padded(sequences()))
    prefix = "model.layers.1."
    attention = [found[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkvo"]
    assert attention[0] is attention[1] is attention[2]
    assert attention[3] is not attention[0]
    assert found[f"{prefix}mlp.gate_proj.weight"] is found[f"{prefix}mlp.up_proj.weight"]
    assert len({id(moments) for moments in found.values()}) == 4 * LAYERS + 1


def test_a_tied_head_stands_under_the_embedding_that_is_stored(tmp_path):
    folder = saved(tmp_path, "llama", tie_word_embeddings=True)
    found = calibrate(str(folder), padded(sequences()))
    assert "lm_head.weight" not in found
    grams, counts = listened(
        build("llama", tie_word_embeddings=True), [{"input_ids": row[None]} for row in sequences()]
    )
    same(found["model.embed_tokens.weight"], grams["lm_head"], counts["lm_head"])


def test_the_outputs_of_a_language_model_are_never_computed(tmp_path, monkeypatch):
    folder, sizes, plain = saved(tmp_path, "llama"), set(), nn.Linear.forward

    def forward(self, x):
        sizes.add(self.out_features)
        return plain(self, x)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    assert "lm_head.weight" in calibrate(str(folder), padded(sequences()))
    assert 24 in sizes
    assert VOCABULARY not in sizes


def test_activations_may_be_kept_in_fewer_bits(tmp_path):
    folder, batches = saved(tmp_path, "llama"), padded(sequences())
    exact = calibrate(str(folder), batches)
    rough = calibrate(str(folder), batches, keep=Keep.BFLOAT16)
    last = f"model.layers.{LAYERS - 1}.mlp.down_proj.weight"
    difference = (exact[last].gram - rough[last].gram).norm() / exact[last].gram.norm()
    assert 0 < difference < 0.05


def test_memory_holds_one_block_or_what_is_outside_the_blocks(tmp_path):
    folder, network = saved(tmp_path, "llama"), build("llama")
    block = sum(p.numel() for p in network.model.layers[0].parameters())
    outside = sum(p.numel() for p in network.parameters()) - LAYERS * block
    del network
    gc.collect()
    before = {id(o) for o in gc.get_objects() if type(o) is nn.Parameter}
    held, told = [], []

    def count(done, total):
        told.append((done, total))
        parameters = [o for o in gc.get_objects() if type(o) is nn.Parameter]
        held.append(sum(p.numel() for p in parameters if not p.is_meta and id(p) not in before))

    batches = padded(sequences())
    calibrate(str(folder), batches, report=count)
    passes = len(batches)
    assert held == [block] * passes * LAYERS + [outside] * passes
    assert told[-1] == (passes * (LAYERS + 1),) * 2


def test_a_plain_network_with_named_blocks():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)).eval()
    network.append(nn.Linear(4, 2))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = network

        def forward(self, x):
            return self.layers(x)

    model, x = Model(), torch.randn(6, 3)
    grams, counts = listened(model, [{"x": x}])
    blocks = given_blocks(model, ["layers.2", "layers.3"])
    parts = list(calibrate_parts(model, blocks, [{"x": part} for part in x.split(4)]))
    assert [list(part) for part in parts[:2]] == [["layers.2.weight"], ["layers.3.weight"]]
    merged = {name: moments for part in parts for name, moments in part.items()}
    assert len(merged) == 4
    for name, gram in grams.items():
        same(merged[f"{name}.weight"], gram, counts[name])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_in_the_weights_names_the_tensor(value, tmp_path):
    folder = saved(tmp_path, "llama")
    name = "model.layers.1.post_attention_layernorm.weight"
    state = load_file(folder / "model.safetensors")
    state[name][0] = value
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(NonFiniteError, match=f"{folder}: tensor {name} holds NaN"):
        calibrate(str(folder), padded(sequences()))


def test_activations_that_overflow_name_the_layer(tmp_path):
    folder = saved(tmp_path, "llama")
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.post_attention_layernorm.weight"][:] = 3e38
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CalibrationError, match=r"layers\.1\.mlp\.\w+_proj\.weight: .*NaN"):
        calibrate(str(folder), padded(sequences()))


def test_no_examples(tmp_path):
    with pytest.raises(CalibrationError, match="no calibration examples"):
        calibrate(str(saved(tmp_path, "llama")), [])


def test_a_missing_tensor_is_named(tmp_path):
    folder = saved(tmp_path, "llama")
    state = load_file(folder / "model.safetensors")
    del state["model.layers.2.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CalibrationError, match=r"no tensor for model\.layers\.2\.mlp\.up_proj"):
        calibrate(str(folder), padded(sequences()))


def changed_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_weights_that_do_not_fit_the_configuration(tmp_path):
    folder = changed_config(saved(tmp_path, "llama"), intermediate_size=20)
    with pytest.raises(CalibrationError, match=r"has shape \[24, 16\], where config"):
        calibrate(folder, padded(sequences()))


def test_the_architecture_implies_the_type(tmp_path):
    folder = saved(tmp_path, "bert")
    expected = calibrate(str(folder), padded(sequences()))
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    assert calibrate(str(folder), padded(sequences())).keys() == expected.keys()


def test_an_unknown_architecture(tmp_path):
    folder = changed_config(saved(tmp_path, "llama"), model_type="of_tomorrow")
    with pytest.raises(CalibrationError, match="of_tomorrow"):
        calibrate(folder, padded(sequences()))


def test_a_model_without_a_configuration(tmp_path):
    folder = saved(tmp_path, "llama")
    (folder / "config.json").unlink()
    with pytest.raises(CalibrationError, match=r"no config\.json"):
        calibrate(str(folder), padded(sequences()))


class Stack(nn.Module):
    """Blocks that are run as `order` says, with what `between` does to their outputs."""

    def __init__(self, order, between=lambda x: x, block=nn.Linear):
        super().__init__()
        self.blocks = nn.ModuleList([block(4, 4) for _ in range(2)])
        self.order, self.between = order, between

    def forward(self, x):
        for number in self.order:
            x = self.between(self.blocks[number](x))
        return x


class Listing(nn.Linear):
    def forward(self, x):
        return [super().forward(x)]


class Pair(nn.Linear):
    """Gives a second tensor, which it takes too."""

    def forward(self, x, more=None):
        return super().forward(x if more is None else x + more), x.square()


class First(Stack):
    """Leaves the blocks' second outputs alone."""

    def forward(self, x):
        for block in self.blocks:
            x, _ = block(x)
        return x


class Both(Stack):
    def forward(self, x):
        more = None
        for block in self.blocks:
            x, more = block(x, more)
        return x


class Transformed(Stack):
    def forward(self, x):
        more = None
        for block in self.blocks:
            x, more = block(x, more)
            more = 2 * more
        return x


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Stack([]), "calls none of them"),
        (Stack([0]), "is not called"),
        (Stack([0, 1, 1]), "out of turn or twice"),
        (Stack([1, 0]), "out of turn or twice"),
        (Stack([0, 1], lambda x: 2 * x), "does not take the output"),
        (Stack([0, 1], block=Listing), "gives no tensor first"),
        (Both([0, 1], block=Pair), "takes more than one output"),
        (Transformed([0, 1], block=Pair), "takes more than one output"),
    ],
)
def test_networks_that_do_not_run_in_blocks(network, message):
    with pytest.raises(CalibrationError, match=message):
        list(calibrate_parts(network, find_blocks(network), [{"x": torch.ones(2, 4)}]))


def test_further_outputs_that_no_block_takes_do_no_harm():
    network = First([], block=Pair)
    x = torch.randn(5, 4)
    grams, counts = listened(network, [{"x": x}])
    parts = calibrate_parts(network, find_blocks(network), [{"x": half} for half in x.split(3)])
    found = {name: moments for part in parts for name, moments in part.items()}
    for name, gram in grams.items():
        same(found[f"{name}.weight"], gram, counts[name])


def test_padding_that_cannot_be_told_from_the_rest():
    class Longer(Stack):
        def forward(self, x, attention_mask):  # noqa: ARG002
            return super().forward(torch.cat([x[:, :1], x], dim=1))

    network = Longer([0, 1])
    batch = {"x": torch.ones(2, 3, 4), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}
    with pytest.raises(CalibrationError, match="do not show which are padding"):
        list(calibrate_parts(network, find_blocks(network), [batch]))
