"""The list of linear layers, against the modules of the real network and the files that it saves."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from isthmus.checkpoints import open_checkpoint
from isthmus.errors import CalibrationError
from isthmus.models.calibration import calibrate
from isthmus.models.layers import Layer, linear_layers

from .networks import LAYERS, NAMES, build, images, padded, saved, sequences


def listed(folder):
    with open_checkpoint(str(folder)) as checkpoint:
        return linear_layers(checkpoint)


@pytest.mark.parametrize("name", NAMES)
def test_the_tensors_are_those_of_the_network(tmp_path, name):
    layers = listed(saved(tmp_path, name))
    stored = load_file(tmp_path / "model.safetensors")
    embeddings = [m.weight for m in build(name).modules() if isinstance(m, nn.Embedding)]
    modules = [
        module
        for module in build(name).modules()
        if (isinstance(module, nn.Linear) or "Conv1D" in str(type(module)))
        and not any(torch.equal(module.weight, table) for table in embeddings)
    ]
    assert len(layers) == len(modules)
    for layer in layers:
        module = next(
            m
            for m in modules
            if m.weight.shape == stored[layer.weight].shape
            and torch.equal(m.weight, stored[layer.weight])
        )
        assert layer.transposed == ("Conv1D" in str(type(module)))
        if layer.bias is None:
            assert module.bias is None
        else:
            assert torch.equal(stored[layer.bias], module.bias)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_is_that_of_calibration(tmp_path, name):
    batches = [{"pixel_values": images()}] if name == "vit" else padded(sequences())
    given = calibrate(str(saved(tmp_path, name)), batches)
    names = [layer.weight for layer in listed(tmp_path)]
    blocks = [[w for w in names if f".{number}." in w] for number in range(LAYERS)]
    assert names[: sum(map(len, blocks))] == [weight for block in blocks for weight in block]
    tied = {"transformer.wte.weight", "bert.embeddings.word_embeddings.weight"}
    assert set(names) == set(given) - tied


def test_a_head_is_listed_unless_it_is_tied(tmp_path):
    head = Layer("lm_head.weight", None, transposed=False)
    assert listed(saved(tmp_path / "own", "llama"))[-1] == head
    assert head not in listed(saved(tmp_path / "tied", "llama", tie_word_embeddings=True))


def test_a_layer_without_its_tensor(tmp_path):
    saved(tmp_path, "llama")
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.2.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CalibrationError, match=r"no tensor for model\.layers\.2\.mlp\.up_proj"):
        listed(tmp_path)


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_an_encoder_that_was_saved_without_its_pooler(tmp_path, name):
    from transformers import BertModel, ViTModel

    folder = saved(tmp_path, name)
    kind = {"bert": BertModel, "vit": ViTModel}[name]
    config = kind.config_class.from_pretrained(folder)
    kind(config).save_pretrained(tmp_path / "whole")
    kind(config, add_pooling_layer=False).save_pretrained(tmp_path / "bare")
    whole, bare = listed(tmp_path / "whole"), listed(tmp_path / "bare")
    assert [layer for layer in whole if "pooler" not in layer.weight] == bare
    assert len(whole) == len(bare) + 1
