"""Merges on calibration data, against least squares on whole networks with hooks."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import isthmus
from isthmus.checkpoints import open_checkpoint
from isthmus.errors import PlanError
from isthmus.models.store import store_moments
from tests.models.networks import padded

from .models import KINDS, inputs, network, recipe, state


class Heard(Exception):
    pass


def heard(model: nn.Module, layer: str, examples) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and outputs of one layer on all examples."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hook(_module, arguments, output):
        found.append((arguments[0].detach(), output.detach()))

    handle = model.get_submodule(layer).register_forward_hook(hook)
    with torch.no_grad():
        for example in examples:
            model(**example)
    handle.remove()
    flat = [(x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])) for x, y in found]
    return torch.cat([x for x, _ in flat]), torch.cat([y for _, y in flat])


def layers_of(kind: str, model: nn.Module) -> list[str]:
    """Linear layers in the order of execution; the head of a tied embedding is none of them."""
    found: list[str] = []
    handles = [
        module.register_forward_hook(lambda *_, _name=name: found.append(_name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]
    with torch.no_grad():
        model(**inputs(0)[0])
    for handle in handles:
        handle.remove()
    return [name for name in found if not (kind == "gpt2" and name == "lm_head")]


def fit(xs, ys) -> torch.Tensor:
    """Least squares with a bias, every task counting alike: [m, n + 1]."""
    scaled = [
        (torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1) / len(x) ** 0.5, y / len(y) ** 0.5)
        for x, y in zip(xs, ys, strict=True)
    ]
    return torch.linalg.lstsq(
        torch.cat([x for x, _ in scaled]), torch.cat([y for _, y in scaled]), driver="gelsd"
    ).solution.mT


def fitted_output(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return x @ weights[:, :-1].mT + weights[:, -1]


def layer_output(model: nn.Module, layer: str, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.get_submodule(layer)(x)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_every_layer_alone_is_least_squares(kind, family, tmp_path):
    """All weights free: outputs on the calibration inputs are those of the best fit."""
    isthmus.merge(recipe(family, kind, basis="optimal", sequential=False), tmp_path / "out")
    merged = network(tmp_path / "out", kind)
    experts = [network(family / kind / name, kind) for name in ("one", "two")]
    for layer in layers_of(kind, merged):
        found = [heard(expert, layer, inputs(seed)) for seed, expert in enumerate(experts)]
        xs, ys = [x for x, _ in found], [y for _, y in found]
        best = fit(xs, ys)
        for x in xs:
            ours = layer_output(merged, layer, x)
            theirs = fitted_output(x, best)
            assert (ours - theirs).norm() < 2e-4 * theirs.norm(), layer


def test_in_sequence_each_layer_meets_what_was_merged(family, tmp_path):
    """Every layer, refitted on the merged network's own inputs to the experts' outputs, stays."""
    isthmus.merge(recipe(family, basis="optimal"), tmp_path / "out")
    merged = network(tmp_path / "out", "bert")
    experts = [network(family / "bert" / name, "bert") for name in ("one", "two")]
    for layer in layers_of("bert", merged):
        xs = [heard(merged, layer, inputs(seed))[0] for seed in range(2)]
        ys = [heard(expert, layer, inputs(seed))[1] for seed, expert in enumerate(experts)]
        best = fit(xs, ys)
        for x in xs:
            ours, theirs = layer_output(merged, layer, x), fitted_output(x, best)
            assert (ours - theirs).norm() < 2e-4 * theirs.norm(), layer


def test_regmean_plus_plus_answers_as_the_experts_on_the_merged_inputs(family, tmp_path):
    isthmus.merge(recipe(family, method="regmean++", keep=1.0), tmp_path / "out")
    merged = network(tmp_path / "out", "bert")
    experts = [network(family / "bert" / name, "bert") for name in ("one", "two")]
    for layer in layers_of("bert", merged):
        xs = [heard(merged, layer, inputs(seed))[0] for seed in range(2)]
        ys = [layer_output(expert, layer, x) for expert, x in zip(experts, xs, strict=True)]
        best = fit(xs, ys)
        for x in xs:
            ours, theirs = layer_output(merged, layer, x), fitted_output(x, best)
            assert (ours - theirs).norm() < 2e-4 * theirs.norm(), layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequential", [False, True])
def test_scalars_lie_in_the_span_of_the_task_vectors(kind, sequential, family, tmp_path):
    made = recipe(family, kind, basis="scalar", sequential=sequential)
    isthmus.merge(made, tmp_path / "out")
    merged, base = state(tmp_path / "out"), state(family / kind / "base")
    experts = [state(family / kind / name) for name in ("one", "two")]
    report = json.loads((tmp_path / "out" / "projection.json").read_text())
    solved = {name: layer for name, layer in report["layers"].items() if "value" in layer}
    assert len(solved) > 10
    for name, layer in solved.items():
        tau = torch.stack([(expert[name] - base[name]).double().flatten() for expert in experts])
        delta = (merged[name] - base[name]).double().flatten()
        d = torch.linalg.lstsq(tau.mT, delta.unsqueeze(1)).solution
        assert (tau.mT @ d - delta.unsqueeze(1)).norm() < 1e-4 * delta.norm()
        for heuristic in layer["contained"]:
            assert layer["value"] <= layer["heuristics"][heuristic] * (1 + 1e-6)
        assert layer["irreducible"] <= layer["value"] * (1 + 1e-6)
    others = (
        set(merged)
        - set(solved)
        - {
            name.replace("weight", "bias")
            for name in solved
            if name.replace("weight", "bias") in base
        }
    )
    for name in others:
        mean = (experts[0][name] + experts[1][name]) / 2
        torch.testing.assert_close(merged[name], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        ("projection", {"basis": basis, "sequential": sequential})
        for basis in ("scalar", "diagonal", "columns", "elementwise", "optimal")
        for sequential in (False, True)
    ]
    + [("regmean", {}), ("regmean++", {}), ("fisher", {}), ("fisher", {"form": "kronecker"})],
)
def test_one_expert_comes_back(method, parameters, family, tmp_path):
    made = recipe(family, method=method, **parameters)
    made["models"] = made["models"][:1]
    isthmus.merge(made, tmp_path / "out")
    merged, expert = (network(path, "bert") for path in (tmp_path / "out", family / "bert" / "one"))
    for example in inputs(0):
        with torch.no_grad():
            torch.testing.assert_close(
                merged(**example).logits, expert(**example).logits, rtol=1e-2, atol=1e-2
            )
    if {"optimal", "elementwise"} & {*parameters.values()} or "reg" in method:
        return  # an answer of least norm leaves at the base what no input tells apart
    for name, tensor in expert.state_dict().items():
        assert (merged.state_dict()[name] - tensor).norm() <= 2e-3 * tensor.norm(), name


@pytest.mark.parametrize("method", ["projection", "regmean", "regmean++", "fisher"])
def test_the_order_of_the_models_does_not_matter(method, family, tmp_path):
    one = recipe(family, method=method)
    two = one | {"models": one["models"][::-1]}
    for number, made in enumerate((one, two)):
        isthmus.merge(made, tmp_path / str(number))
    for name, tensor in state(tmp_path / "0").items():
        torch.testing.assert_close(state(tmp_path / "1")[name], tensor, rtol=1e-4, atol=1e-5)


def test_same_bytes_whatever_the_number_of_workers(family, tmp_path):
    made = recipe(family) | {"name": "same"}
    for workers in (1, 3):
        isthmus.merge(made, tmp_path / str(workers), workers=workers)
    files = ["model.safetensors", "projection.json", "README.md"]
    for file in files:
        assert (tmp_path / "1" / file).read_bytes() == (tmp_path / "3" / file).read_bytes()


@pytest.mark.parametrize("sequential", [False, True])
def test_activations_on_disk_change_nothing_and_rough_ones_little(sequential, family, tmp_path):
    made = recipe(family, sequential=sequential)
    for kind in ("float32", "disk", "bfloat16"):
        content = made | {"calibration": {"tokens": 16, "activations": kind}}
        isthmus.merge(content, tmp_path / kind)
    exact, disk, rough = (state(tmp_path / kind) for kind in ("float32", "disk", "bfloat16"))
    assert all(torch.equal(disk[name], tensor) for name, tensor in exact.items())
    assert any(not torch.equal(rough[name], tensor) for name, tensor in exact.items())
    for name, tensor in exact.items():
        assert (rough[name] - tensor).norm() < 0.05 * tensor.norm()


def test_stored_statistics_give_what_the_examples_give(family, tmp_path):
    from isthmus.models.data import calibration_batches

    made = recipe(family, sequential=False)
    stored = recipe(family, sequential=False)
    for entry, name in zip(stored["models"], ("one", "two"), strict=True):
        with open_checkpoint(str(family / "bert" / name)) as checkpoint:
            batches = calibration_batches(checkpoint, family / f"{name}.jsonl", tokens=16)
            store_moments(checkpoint, batches, tmp_path / f"{name}.stats")
        entry["calibration"] = str(tmp_path / f"{name}.stats")
    for folder, content in (("a", made), ("b", stored)):
        isthmus.merge(content, tmp_path / folder)
    for name, tensor in state(tmp_path / "a").items():
        assert torch.equal(state(tmp_path / "b")[name], tensor)


def test_layers_that_a_filter_leaves_out_are_averaged(family, tmp_path):
    basis = [{"filter": "attention", "value": "none"}, {"value": "diagonal"}]
    isthmus.merge(recipe(family, basis=basis), tmp_path / "out")
    report = json.loads((tmp_path / "out" / "projection.json").read_text())
    assert report["layers"]
    assert not any("attention" in name for name in report["layers"])
    name = "bert.encoder.layer.0.attention.self.query.weight"
    mean = sum(state(family / "bert" / one)[name] for one in ("one", "two")) / 2
    torch.testing.assert_close(state(tmp_path / "out")[name], mean, rtol=1e-5, atol=1e-6)


def test_weights_say_which_expert_matters(family, tmp_path):
    made = recipe(family, basis="scalar", sequential=False)
    made["models"][0]["parameters"] = {"weight": 1000.0}
    isthmus.merge(made, tmp_path / "out")
    merged, one = state(tmp_path / "out"), state(family / "bert" / "one")
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    assert (merged[name] - one[name]).norm() < 0.05 * (
        merged[name] - state(family / "bert" / "two")[name]
    ).norm()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("basis", ["scalar", "blocks"])
def test_the_networks_own_output_as_objective(kind, basis, family, tmp_path):
    """What is written are the coefficients, and outputs are nearer than those of the mean."""
    parameters = {"objective": "network", "basis": basis, "sweeps": 2}
    isthmus.merge(recipe(family, kind, **parameters), tmp_path / "out")
    report = json.loads((tmp_path / "out" / "projection.json").read_text())
    assert report["values"] == sorted(report["values"], reverse=True)
    merged, base = state(tmp_path / "out"), state(family / kind / "base")
    experts = [state(family / kind / name) for name in ("one", "two")]
    for name, tensor in merged.items():
        d = report["coefficients"].get(name, (0.5, 0.5))
        expected = base[name] + sum(
            w * (expert[name] - base[name]) for w, expert in zip(d, experts, strict=True)
        )
        torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-6)
    # Embeddings, three blocks, and a last norm, which BERT lacks.
    groups = 1 if basis == "scalar" else 4 + (kind != "bert")
    assert len({tuple(d) for d in report["coefficients"].values()}) == groups


def test_one_expert_comes_back_by_the_networks_output(family, tmp_path):
    made = recipe(family, objective="network", basis="scalar", sweeps=6)
    made["models"] = made["models"][:1]
    isthmus.merge(made, tmp_path / "out")
    report = json.loads((tmp_path / "out" / "projection.json").read_text())
    assert report["captured"] == pytest.approx(1, abs=1e-4)
    assert next(iter(report["coefficients"].values())) == pytest.approx([1], abs=1e-2)


def test_places_are_too_many_for_the_networks_output(family, tmp_path):
    with pytest.raises(PlanError, match="Write basis: scalar, blocks, modules"):
        isthmus.merge(recipe(family, objective="network", basis="columns"), tmp_path / "out")
    with pytest.raises(PlanError, match="blocks is none of single layers"):
        isthmus.merge(recipe(family, basis="blocks"), tmp_path / "out")


def test_transformers_loads_the_merge(family, tmp_path):
    from transformers import AutoModelForCausalLM

    isthmus.merge(recipe(family, "llama") | {"dtype": "bfloat16"}, tmp_path / "out")
    loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert torch.isfinite(loaded(**padded([torch.arange(3, 9)])[0]).logits).all()
