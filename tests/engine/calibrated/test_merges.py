"""Merges on calibration data, against least squares on whole networks with hooks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import isthmus
from isthmus.checkpoints import open_checkpoint
from isthmus.errors import CalibrationError, IsthmusError, MethodError, NonFiniteError, PlanError
from isthmus.models.store import store_moments
from tests.models.networks import WIDTH, add_tokenizer, build, padded

WORDS = tuple("abcdefghijklmnopqrstuvwxyz")
KINDS = ("bert", "gpt2", "llama")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def texts(seed: int, count: int = 30) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS[seed::2], draw.integers(3, 12))) for _ in range(count)]


def near(network: nn.Module, seed: int) -> nn.Module:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    return network


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """By kind of network: a folder with `base`, `one`, `two`, and their examples."""
    root = tmp_path_factory.mktemp("families")
    for kind in KINDS:
        for name, seed in (("base", None), ("one", 1), ("two", 2)):
            network = build(kind)
            folder = root / kind / name
            (network if seed is None else near(network, seed)).save_pretrained(folder)
            add_tokenizer(folder, WORDS)
    for seed, name in enumerate(("one", "two")):
        lines = [json.dumps({"text": text}) for text in texts(seed)]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
    return root


def recipe(root: Path, kind: str = "bert", method: str = "projection", **parameters) -> dict:
    return {
        "merge_method": method,
        "base_model": str(root / kind / "base"),
        "models": [
            {"model": str(root / kind / name), "calibration": str(root / f"{name}.jsonl")}
            for name in ("one", "two")
        ],
        "parameters": parameters,
        "calibration": {"tokens": 16},
    }


def state(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def network(folder: Path, kind: str) -> nn.Module:
    made = build(kind)
    missing = made.load_state_dict(state(folder), strict=False)
    assert not missing.unexpected_keys
    return made.double().eval()


def inputs(seed: int):
    """As the tokenizer makes them, one text at a time."""
    return [
        {"input_ids": torch.tensor([[WORDS.index(word) + 3 for word in text.split()]])}
        for text in texts(seed)
    ]


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


def test_an_interrupted_merge_goes_on_and_ends_in_the_same_bytes(family, tmp_path, monkeypatch):
    made = recipe(family) | {"name": "same"}
    isthmus.merge(made, tmp_path / "whole")

    from isthmus.models.solved import SolvedLayers

    add, count = SolvedLayers.add, [0]

    def failing(self, *arguments):
        count[0] += 1
        if count[0] == 6:
            raise KeyboardInterrupt
        add(self, *arguments)

    monkeypatch.setattr(SolvedLayers, "add", failing)
    with pytest.raises(KeyboardInterrupt):
        isthmus.merge(made, tmp_path / "out")
    counted = count[0]
    with pytest.raises(IsthmusError, match="interrupted merge"):
        isthmus.merge(made, tmp_path / "out")
    isthmus.merge(made, tmp_path / "out", resume=True)
    layers = len(json.loads((tmp_path / "out" / "projection.json").read_text())["layers"])
    assert count[0] - counted == layers - 5  # what was solved is not solved again
    for file in ("model.safetensors", "projection.json", "README.md"):
        ours, theirs = (tmp_path / folder / file for folder in ("out", "whole"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_spoilt_layers_of_an_interrupted_merge_are_made_anew(family, tmp_path, monkeypatch):
    made = recipe(family) | {"name": "same"}
    isthmus.merge(made, tmp_path / "whole")

    from isthmus.models.solved import SolvedLayers

    add, count = SolvedLayers.add, [0]

    def failing(self, *arguments):
        count[0] += 1
        if count[0] == 6:
            raise KeyboardInterrupt
        add(self, *arguments)

    monkeypatch.setattr(SolvedLayers, "add", failing)
    with pytest.raises(KeyboardInterrupt):
        isthmus.merge(made, tmp_path / "out")
    folder = tmp_path / "out" / ".isthmus" / "layers"
    cut, broken, *_ = sorted(folder.glob("*.safetensors"))
    cut.write_bytes(cut.read_bytes()[:-10])
    broken.with_suffix(".json").write_text("{")
    isthmus.merge(made, tmp_path / "out", resume=True)
    for file in ("model.safetensors", "projection.json"):
        ours, theirs = (tmp_path / name / file for name in ("out", "whole"))
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("content", [None, "{", '{"coefficients": 3}'])
def test_coefficients_of_the_network_are_kept_unless_spoilt(content, family, tmp_path, monkeypatch):
    made = recipe(family, objective="network", basis="scalar", sweeps=1) | {"name": "same"}
    isthmus.merge(made, tmp_path / "whole")

    from isthmus.engine.network_stage import NetworkStage
    from isthmus.engine.worker import Worker

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "make", interrupted)
        with pytest.raises(KeyboardInterrupt):
            isthmus.merge(made, tmp_path / "out")
    kept = tmp_path / "out" / ".isthmus" / "layers" / "network.json"
    if content is None:
        monkeypatch.setattr(NetworkStage, "_found", interrupted)
    else:
        kept.write_text(content)
    isthmus.merge(made, tmp_path / "out", resume=True)
    for file in ("model.safetensors", "projection.json"):
        ours, theirs = (tmp_path / name / file for name in ("out", "whole"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_other_examples_are_another_merge(family, tmp_path, monkeypatch):
    made = recipe(family)
    shutil.copy(family / "one.jsonl", tmp_path / "one.jsonl")
    made["models"][0]["calibration"] = str(tmp_path / "one.jsonl")

    from isthmus.models.solved import SolvedLayers

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(SolvedLayers, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        isthmus.merge(made, tmp_path / "out")
    shutil.copy(family / "two.jsonl", tmp_path / "one.jsonl")
    with pytest.raises(IsthmusError, match="other inputs"):
        isthmus.merge(made, tmp_path / "out", resume=True)


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


# Bad input


def test_a_model_without_examples_file(family, tmp_path):
    made = recipe(family)
    made["models"][1]["calibration"] = str(tmp_path / "nothing.jsonl")
    with pytest.raises(CalibrationError, match=r"nothing\.jsonl"):
        isthmus.merge(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_stored_statistics_do_not_go_with_a_sequence(family, tmp_path):
    from isthmus.models.data import calibration_batches

    with open_checkpoint(str(family / "bert" / "one")) as checkpoint:
        batches = calibration_batches(checkpoint, family / "one.jsonl", tokens=16)
        store_moments(checkpoint, batches, tmp_path / "stats")
    made = recipe(family)
    made["models"][0]["calibration"] = str(tmp_path / "stats")
    with pytest.raises(PlanError, match="sequential: false"):
        isthmus.merge(made, tmp_path / "out")
    # and not with another model
    made = recipe(family, sequential=False)
    made["models"][1]["calibration"] = str(tmp_path / "stats")
    with pytest.raises(CalibrationError, match="another model"):
        isthmus.merge(made, tmp_path / "out")


def test_nan_in_an_expert(family, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(family / "bert" / "two", broken)
    tensors = state(broken)
    tensors["bert.encoder.layer.1.output.dense.weight"][3, 4] = torch.nan
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    for sequential in (False, True):
        made = recipe(family, sequential=sequential)
        made["models"][1]["model"] = str(broken)
        with pytest.raises(NonFiniteError, match=r"broken: tensor .*layer\.1\.output.* NaN"):
            isthmus.merge(made, tmp_path / f"out-{sequential}")


def test_nan_in_an_embedding(family, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(family / "bert" / "two", broken)
    tensors = state(broken)
    tensors["bert.embeddings.word_embeddings.weight"][30, 0] = torch.nan
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    for sequential in (False, True):
        made = recipe(family, sequential=sequential)
        made["models"][1]["model"] = str(broken)
        with pytest.raises(NonFiniteError, match=r"broken: tensor .*word_embeddings.* NaN"):
            isthmus.merge(made, tmp_path / f"out-{sequential}")


def test_activations_that_overflow_name_the_expert(family, tmp_path):
    huge = tmp_path / "huge"
    shutil.copytree(family / "bert" / "two", huge)
    tensors = state(huge)
    tensors["bert.encoder.layer.0.output.LayerNorm.weight"][:] = 3e38
    save_file(tensors, huge / "model.safetensors", {"format": "pt"})
    made = recipe(family, sequential=False)
    made["models"][1]["model"] = str(huge)
    with pytest.raises(
        CalibrationError, match=r"huge: .*layer\.1\.attention\.self\.\w+\.weight.*NaN"
    ):
        isthmus.merge(made, tmp_path / "out")


def test_errors_in_examples_name_the_file_and_the_model(family, tmp_path):
    made = recipe(family)
    made["calibration"] = {"tokens": 90}
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"text": " ".join(WORDS * 3)}))
    made["models"][1]["calibration"] = str(long)
    with pytest.raises(
        CalibrationError, match=r"long\.jsonl for .*two: .* 78 tokens.*\n.*tokens: 24"
    ):
        isthmus.merge(made, tmp_path / "out")


def test_statistics_of_layers_of_another_size(family, tmp_path):
    from isthmus.models.data import calibration_batches

    made = recipe(family, sequential=False)
    for number, name in enumerate(("one", "two")):
        with open_checkpoint(str(family / "bert" / name)) as checkpoint:
            batches = calibration_batches(checkpoint, family / f"{name}.jsonl", tokens=16)
            store_moments(checkpoint, batches, tmp_path / name)
        made["models"][number]["calibration"] = str(tmp_path / name)
    described = json.loads((tmp_path / "two" / "calibration.json").read_text())
    places = described["weights"]
    layer = "bert.encoder.layer.0"
    places[f"{layer}.attention.self.query.weight"] = places[f"{layer}.output.dense.weight"]
    (tmp_path / "two" / "calibration.json").write_text(json.dumps(described))
    with pytest.raises(MethodError, match=r"layer\.0\.attention\.self\.query.*inputs of size 24"):
        isthmus.merge(made, tmp_path / "out")


def test_all_weights_zero(family, tmp_path):
    with pytest.raises(PlanError, match=r"all models are 0\n.*a weight above 0"):
        isthmus.merge(recipe(family, weight=0), tmp_path / "out")


def test_a_simplex_by_the_networks_output(family, tmp_path):
    made = recipe(family, objective="network", basis="blocks", constraint="simplex")
    with pytest.raises(PlanError, match="simplex"):
        isthmus.merge(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_holds_the_model_but_not_its_layers(family, tmp_path, monkeypatch):
    """Layers wait in float32 beside the output; both must fit."""
    size = (family / "bert" / "base" / "model.safetensors").stat().st_size
    with isthmus.plan(recipe(family)) as plan:
        layers = plan.stage.bytes_kept
        needed = plan.bytes_to_write + plan.small_files
    assert layers > 0.5 * size
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed - layers // 2))
    with pytest.raises(PlanError, match="the disk of"):
        isthmus.merge(recipe(family), tmp_path / "out")


def others(kind: str, root: Path) -> dict:
    """A recipe for tiny networks of another kind."""
    import transformers as t

    for name, seed in (("base", None), ("one", 1), ("two", 2)):
        torch.manual_seed(0)
        if kind == "mamba":
            shape = {"hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4}
            made = t.MambaForCausalLM(t.MambaConfig(vocab_size=40, **shape))
        else:
            shape = {"d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
            made = t.T5ForConditionalGeneration(t.T5Config(vocab_size=40, **shape))
        (made if seed is None else near(made, seed)).save_pretrained(root / kind / name)
        add_tokenizer(root / kind / name, WORDS)
    for seed, name in enumerate(("one", "two")):
        lines = [json.dumps({"text": text}) for text in texts(seed)]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
    return recipe(root, kind)


@pytest.mark.parametrize("sequential", [True, False])
def test_a_layer_that_is_never_called_does_not_hide_those_after_it(sequential, tmp_path):
    """Mamba multiplies by the weight of dt_proj itself, in the middle of each block."""
    made = others("mamba", tmp_path)
    made["parameters"] = {"sequential": sequential}
    isthmus.merge(made, tmp_path / "out")
    layers = json.loads((tmp_path / "out" / "projection.json").read_text())["layers"]
    assert len(layers) == 8
    for name, found in layers.items():
        assert ("initial" in found) == ("dt_proj" not in name), name


@pytest.mark.parametrize("sequential", [True, False])
def test_an_encoder_decoder(sequential, tmp_path):
    made = others("t5", tmp_path)
    made["parameters"] = {"sequential": sequential}
    with pytest.raises(CalibrationError, match="T5ForConditionalGeneration is an encoder-decoder"):
        isthmus.merge(made, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_network_that_fails_on_its_examples(family, tmp_path, monkeypatch):
    from transformers.models.bert.modeling_bert import BertEmbeddings

    def fail(*_, **__):
        raise ValueError("no such position")

    monkeypatch.setattr(BertEmbeddings, "forward", fail)
    with pytest.raises(CalibrationError, match="cannot be run on the examples: no such position"):
        isthmus.merge(recipe(family), tmp_path / "out")


def test_a_basis_for_no_layer(family, tmp_path):
    with pytest.raises(PlanError, match="no linear layer"):
        isthmus.merge(recipe(family, basis="none"), tmp_path / "out")


def test_settings_that_exclude_each_other(family, tmp_path):
    with pytest.raises(PlanError, match=r"query\.weight: a simplex"):
        isthmus.merge(recipe(family, basis="columns", constraint="simplex"), tmp_path / "out")


def test_a_half_group(family, tmp_path):
    with pytest.raises(PlanError, match="group must be a whole number"):
        isthmus.merge(recipe(family, group=1.5), tmp_path / "out")


def test_sequences_by_filter(family, tmp_path):
    sequential = [{"filter": "layer.0", "value": False}, {"value": True}]
    with pytest.raises(PlanError, match="without a filter"):
        isthmus.merge(recipe(family, sequential=sequential), tmp_path / "out")


def test_state_dicts_are_no_networks():
    weights = {"w": torch.ones(WIDTH, WIDTH)}
    with pytest.raises(MethodError, match="merge the folders"):
        isthmus.merge_state_dicts({"one": weights}, base=weights, method="projection")
