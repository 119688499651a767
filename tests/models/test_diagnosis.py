"""Diagnosis of whole networks from stored moments."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import isthmus
from isthmus.checkpoints import open_checkpoint
from isthmus.engine.matching import match
from isthmus.errors import CalibrationError, NonFiniteError
from isthmus.models.diagnosis import diagnose
from isthmus.models.store import StoredMoments, store_moments
from isthmus.projection.diagnosis import BASES, CONTAINS

from .networks import build, images, padded, saved, sequences

NAMES = ("llama", "gpt2", "bert", "vit")


def expert(folder, name, seed):
    """A fine-tune: the base and a little noise."""
    network = build(name)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=draw))
    network.save_pretrained(folder)
    return folder


def examples(name, seed=0):
    if name == "vit":
        return [{"pixel_values": images(3 + seed)}]
    return padded(sequences(seed, (7, 9, 5, 9)))


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


class Family:
    """A base, two experts and their moments."""

    def __init__(self, folder, name):
        self.base = saved(folder / "base", name)
        self.experts = [expert(folder / f"expert{seed}", name, seed) for seed in (1, 2)]
        self.stats = [folder / f"stats{seed}" for seed in (1, 2)]
        for seed, (model, out) in enumerate(zip(self.experts, self.stats, strict=True)):
            with open_checkpoint(str(model)) as checkpoint:
                store_moments(checkpoint, examples(name, seed), out)

    def diagnose(self, stats=None, names=None, **options):
        models = [open_checkpoint(str(path)) for path in (self.base, *self.experts)]
        if names is None:
            names = {one.info.name: one.names[1:] for one in match(models).matched}
        moments = [StoredMoments(path) for path in (self.stats if stats is None else stats)]
        return diagnose(models[0], models[1:], moments, names, **options)


@pytest.fixture
def llama(tmp_path):
    return Family(tmp_path, "llama")


def mean_square(moments, correction):
    """The mean of ‖Δx‖² over inputs, from a factor of their moments."""
    gram = moments.gram[: correction.shape[1], : correction.shape[1]]
    values, vectors = torch.linalg.eigh(gram)
    x = (vectors * values.clamp(min=0).sqrt()).mT
    return float((x @ correction.mT).square().sum()) / moments.count


def test_the_first_error_is_the_experts_distance(name, tmp_path):
    family = Family(tmp_path, name)
    found = family.diagnose()
    base = load_file(family.base / "model.safetensors")
    tuned = [load_file(path / "model.safetensors") for path in family.experts]
    assert found.layers
    for weight, layer in found.layers.items():
        bias = weight.removesuffix("weight") + "bias"
        bias = bias if bias in base else None
        expected = 0.0
        for state, stats in zip(tuned, family.stats, strict=True):
            change = state[weight].double() - base[weight].double()
            # GPT-2 alone stores the transpose.
            change = change.mT if name == "gpt2" else change
            if bias:
                column = state[bias].double() - base[bias].double()
                change = torch.cat([change, column.unsqueeze(1)], dim=1)
            expected += mean_square(StoredMoments(stats)[weight], change)
        assert layer.initial == pytest.approx(expected, rel=1e-8)


def test_every_network_keeps_the_order_of_bases(name, tmp_path):
    found = Family(tmp_path, name).diagnose()
    for layer in found.layers.values():
        assert layer.initial > 0
        for basis in BASES:
            slack = 1e-7 * layer.initial
            for point in CONTAINS[basis]:
                assert layer.projections[basis] <= layer.value(point) + slack
        assert not layer.unchanged
        assert not layer.silent


def test_what_merges_apart_is_what_was_foretold(llama, tmp_path):
    models = [
        {"model": str(model), "calibration": {"data": str(stats)}}
        for model, stats in zip(llama.experts, llama.stats, strict=True)
    ]
    found = llama.diagnose()
    for basis in ("scalar", "diagonal", "optimal"):
        recipe = {
            "merge_method": "projection",
            "base_model": str(llama.base),
            "models": models,
            "parameters": {"basis": basis, "sequential": False},
        }
        isthmus.merge(recipe, tmp_path / basis)
        told = json.loads((tmp_path / basis / "projection.json").read_text())["layers"]
        assert set(told) == set(found.layers)
        for weight, layer in found.layers.items():
            assert told[weight]["initial"] == pytest.approx(layer.initial)
            assert told[weight]["value"] == pytest.approx(
                layer.projections[basis], abs=1e-9 * layer.initial
            )


def test_progress_is_told(llama):
    steps = []
    found = llama.diagnose(report=lambda *step: steps.append(step))
    count = len(found.layers) + len(found.left_out)
    assert steps == [(number + 1, count) for number in range(count)]


def test_an_expert_that_is_the_base(llama, tmp_path):
    with open_checkpoint(str(llama.base)) as checkpoint:
        store_moments(checkpoint, examples("llama"), tmp_path / "own")
    llama.experts[1] = llama.base
    found = llama.diagnose([llama.stats[0], tmp_path / "own"])
    assert {layer.unchanged for layer in found.layers.values()} == {(1,)}


def test_as_many_statistics_as_experts(llama):
    with pytest.raises(CalibrationError, match="1 calibration statistics for 2 experts"):
        llama.diagnose(llama.stats[:1])


def test_statistics_of_another_model(llama):
    with pytest.raises(CalibrationError, match=r"stats2 holds .* of another model than .*expert1"):
        llama.diagnose(llama.stats[::-1])


def test_statistics_that_lack_a_layer(llama):
    path = llama.stats[1] / "calibration.json"
    content = json.loads(path.read_text())
    del content["weights"]["model.layers.1.mlp.up_proj.weight"]
    path.write_text(json.dumps(content))
    with pytest.raises(
        CalibrationError, match=r"stats2 has no inputs of .*layers\.1\.mlp\.up_proj"
    ):
        llama.diagnose()


def test_a_layer_that_no_example_reaches_is_left_out(llama):
    weight = "model.layers.1.mlp.up_proj.weight"
    for stats in llama.stats:
        path = stats / "calibration.json"
        content = json.loads(path.read_text())
        del content["weights"][weight]
        path.write_text(json.dumps(content))
    found = llama.diagnose()
    assert found.left_out == {weight: "no example reaches it"}
    assert weight not in found.layers


def test_a_layer_that_models_do_not_share_is_left_out(llama):
    weight = "model.layers.1.mlp.up_proj.weight"
    names = {name: (name, name) for name in StoredMoments(llama.stats[0]) if name != weight}
    assert llama.diagnose(names=names).left_out == {
        weight: "not in every model with the same shape"
    }
    with pytest.raises(CalibrationError, match="no linear layer can be judged"):
        llama.diagnose(names={})


def test_statistics_that_do_not_fit(llama):
    path = next(llama.stats[0].glob("*00001.safetensors"))
    state = load_file(path)
    weight = next(name for name in state if "down_proj" in name)
    state[weight] = state[weight][:-1, :-1].contiguous()
    save_file(state, path)
    with pytest.raises(CalibrationError, match=rf"the matrix {weight} is not one of 30 inputs"):
        llama.diagnose()


def test_a_model_with_nan(llama):
    path = llama.base / "model.safetensors"
    state = load_file(path)
    state["model.layers.2.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(state, path, {"format": "pt"})
    with pytest.raises(NonFiniteError, match=r"base: tensor model\.layers\.2\.mlp\.up_proj"):
        llama.diagnose()
