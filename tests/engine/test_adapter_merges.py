"""Merging LoRA adapters into an adapter, or into a whole model."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import isthmus
from isthmus.engine.verify import verify
from isthmus.errors import MethodError, NonFiniteError, PlanError, RecipeError
from isthmus.methods.registry import METHODS

from .adapters import DOWN, SHAPES, Q, close, updates, write_adapter
from .models import WIDTH, contents, family, recipe, refused, write_model

# Methods that look at data run networks: calibrated/test_adapters.py.
MERGING = [name for name, method in METHODS.items() if method.spaces and not method.calibrated]

SEVERAL = [name for name in MERGING if METHODS[name].max_experts is None]

# These make all singular values alike, those of a single adapter too.
RESHAPING = {"iso_c", "iso_cts"}


@pytest.fixture
def three(tmp_path):
    """Adapters of different ranks, scalings and modules."""
    return [
        write_adapter(tmp_path / "one", 1),
        write_adapter(tmp_path / "two", 2, r=3, use_rslora=True, alpha_pattern={"down_proj": 7}),
        write_adapter(tmp_path / "three", 3, modules=(Q,), ranks={Q: 4}, dtype=torch.bfloat16),
    ]


def whole(method, adapters, weights=None, **extra):
    """A recipe with parameters under which one adapter at weight 1 comes back."""
    content = recipe(method, adapters, **extra)
    known = (
        {parameter.name for parameter in METHODS[method].parameters} if method in METHODS else set()
    )
    if "density" in known:
        content.setdefault("parameters", {})["density"] = 1.0
    for entry, weight in zip(content["models"], weights or [1.0] * len(adapters), strict=True):
        entry["parameters"] = {"weight": weight} if "weight" in known else {}
    return content


def test_linear_is_the_exact_average(three, tmp_path):
    isthmus.merge(whole("linear", three, [2.0, 1.0, -1.0], rank=9), tmp_path / "out")
    dense = [updates(folder) for folder in three]
    expected = {
        module: sum(
            weight * one.get(module, torch.zeros(SHAPES[module]).double())
            for weight, one in zip([2.0, 1.0, -1.0], dense, strict=True)
        )
        / 2
        for module in SHAPES
    }
    close(updates(tmp_path / "out"), expected)


def test_the_asked_rank_is_the_best_approximation(three, tmp_path):
    outcome = isthmus.merge(whole("linear", three, rank=2), tmp_path / "out")
    dense = [updates(folder) for folder in three]
    total = {m: sum(one[m] for one in dense if m in one) / 3 for m in SHAPES}
    best = {}
    for module, update in total.items():
        u, s, vh = torch.linalg.svd(update)
        best[module] = u[:, :2] * s[:2] @ vh[:2]
    close(updates(tmp_path / "out"), best)
    kept = sum(float(b.square().sum()) for b in best.values())
    share = kept / sum(float(t.square().sum()) for t in total.values())
    assert any(f"{share:.1%}" in note for note in outcome.notes)


def test_without_a_rank_the_largest_of_the_module_is_kept(three, tmp_path):
    isthmus.merge(whole("linear", three), tmp_path / "out")
    state = load_file(tmp_path / "out/adapter_model.safetensors")
    assert state[f"base_model.model.{Q}.lora_A.weight"].shape[0] == 4
    assert state[f"base_model.model.{DOWN}.lora_A.weight"].shape[0] == 3


@pytest.mark.parametrize("method", [m for m in MERGING if m not in RESHAPING])
@pytest.mark.parametrize("kind", ["plain", "rslora", "patterns", "absent"])
def test_one_adapter_at_weight_1_comes_back(method, kind, tmp_path):
    config = {
        "plain": {},
        "rslora": {"use_rslora": True},
        "patterns": {"ranks": {DOWN: 3}, "alpha_pattern": {"q_proj": 1}},
        "absent": {"modules": (Q,)},
    }[kind]
    one = write_adapter(tmp_path / "one", 5, **config)
    isthmus.merge(whole(method, [one]), tmp_path / "out")
    close(updates(tmp_path / "out"), updates(one))


@pytest.mark.parametrize("method", SEVERAL)
def test_workers_and_a_second_run_give_the_same_bytes(method, three, tmp_path):
    content = recipe(method, three)
    if method in ("dare_linear", "dare_ties", "ties", "magnitude"):
        content["parameters"] = {"density": 0.6}
    for workers in (1, 2):
        isthmus.merge(content, tmp_path / f"out{workers}", workers=workers)
    one, two = contents(tmp_path / "out1"), contents(tmp_path / "out2")
    one.pop("README.md"), two.pop("README.md")  # they name their folders
    one.pop("isthmus-manifest.json"), two.pop("isthmus-manifest.json")
    assert one == two
    assert not verify(tmp_path / "out1").problems


def test_short_names_choose_the_space(three, tmp_path):
    short = recipe("core_ties", three, parameters={"density": 0.5})
    long = recipe("ties", three, parameters={"density": 0.5}, space="core")
    plain = recipe("ties", three, parameters={"density": 0.5})
    for name, content in (("short", short), ("long", long), ("plain", plain)):
        isthmus.merge(content, tmp_path / name)
    files = [
        (tmp_path / n / "adapter_model.safetensors").read_bytes()
        for n in ("short", "long", "plain")
    ]
    assert files[0] == files[1] != files[2]


def regauged(folder, target):
    """The same updates from other factors, badly conditioned."""
    state = load_file(folder / "adapter_model.safetensors")
    draw = torch.Generator().manual_seed(0)
    for name in [name for name in state if ".lora_A." in name]:
        rank = state[name].shape[0]
        q = torch.randn(rank, rank, generator=draw, dtype=torch.float64)
        q = q @ torch.diag(torch.logspace(-1, 1, rank).double())
        a, b = state[name].double(), state[name.replace("lora_A", "lora_B")].double()
        state[name] = torch.linalg.solve(q, a).contiguous()
        state[name.replace("lora_A", "lora_B")] = b @ q
    target.mkdir()
    save_file(state, target / "adapter_model.safetensors", {"format": "pt"})
    (target / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    return target


@pytest.mark.parametrize("method", [m for m in SEVERAL if not METHODS[m].random])
def test_how_an_adapter_is_written_down_does_not_matter(method, three, tmp_path):
    others = [regauged(folder, tmp_path / f"{folder.name}-again") for folder in three]
    content = {"parameters": {"density": 0.5}} if method in ("ties", "magnitude") else {}
    isthmus.merge(recipe(method, three, dtype="float64", **content), tmp_path / "a")
    isthmus.merge(recipe(method, others, dtype="float64", **content), tmp_path / "b")
    close(updates(tmp_path / "b"), updates(tmp_path / "a"))


def test_a_whole_model_is_the_base_and_the_merged_adapter(three, tmp_path):
    base, *_ = family(tmp_path / "models", 1)
    content = whole("linear", three, rank=9, base_model=str(base))
    isthmus.merge(content, tmp_path / "adapter")
    outcome = isthmus.merge(content | {"output": "full"}, tmp_path / "full")
    before, after = (load_file(p / "model.safetensors") for p in (base, tmp_path / "full"))
    merged = updates(tmp_path / "adapter")
    assert before.keys() == after.keys()
    for name, tensor in after.items():
        change = merged.get(name.removesuffix(".weight"))
        expected = before[name].double() + (0 if change is None else change)
        assert torch.allclose(tensor.double(), expected, atol=1e-5), name
    assert outcome.merged == len(merged)
    assert (tmp_path / "full/config.json").exists()
    assert not verify(tmp_path / "full").problems


def test_modules_that_are_named_with_and_without_a_prefix_are_one(three, tmp_path):
    base, *_ = family(tmp_path / "models", 1)
    other = tmp_path / "other"
    shutil.copytree(three[1], other)
    state = load_file(other / "adapter_model.safetensors")
    bare = {name.replace("model.model.layers", "model.layers"): v for name, v in state.items()}
    save_file(bare, other / "adapter_model.safetensors", {"format": "pt"})
    for name, second in (("plain", three[1]), ("bare", other)):
        content = whole("task_arithmetic", [three[0], second], base=base, output="full")
        isthmus.merge(content, tmp_path / name)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "bare")]
    assert files[0] == files[1]


class TestStoredInFull:
    """modules_to_save."""

    head = torch.arange(2.0 * WIDTH).reshape(2, WIDTH)

    def test_is_merged_by_the_same_method(self, tmp_path):
        one = write_adapter(tmp_path / "one", 1, saved={"score.weight": self.head})
        two = write_adapter(tmp_path / "two", 2, saved={"score.weight": 3 * self.head})
        isthmus.merge(whole("linear", [one, two]), tmp_path / "out")
        state = load_file(tmp_path / "out/adapter_model.safetensors")
        assert torch.allclose(state["base_model.model.score.weight"], 2 * self.head)
        config = json.loads((tmp_path / "out/adapter_config.json").read_text())
        assert config["modules_to_save"] == ["score"]

    def test_counts_as_the_base_where_an_adapter_lacks_it(self, tmp_path):
        base, *_ = family(tmp_path / "models", 1)
        norm = load_file(base / "model.safetensors")["model.norm.weight"]
        one = write_adapter(tmp_path / "one", 1, saved={"model.norm.weight": norm + 2})
        two = write_adapter(tmp_path / "two", 2)
        content = whole("task_arithmetic", [one, two], base=base)
        isthmus.merge(content, tmp_path / "out")
        state = load_file(tmp_path / "out/adapter_model.safetensors")
        assert torch.allclose(state["base_model.model.model.norm.weight"], norm + 2)
        isthmus.merge(content | {"output": "full"}, tmp_path / "full")
        state = load_file(tmp_path / "full/model.safetensors")
        assert torch.allclose(state["model.norm.weight"], norm + 2)

    def test_is_refused_where_nothing_stands_for_it(self, tmp_path):
        one = write_adapter(tmp_path / "one", 1, saved={"score.weight": self.head})
        two = write_adapter(tmp_path / "two", 2)
        message = refused(whole("linear", [one, two]), tmp_path / "out", PlanError)
        assert "score.weight" in message
        assert "base_model" in message
        content = whole("linear", [one, two], tensors="common")
        outcome = isthmus.merge(content, tmp_path / "out")
        assert any("score.weight" in note for note in outcome.notes)

    def test_is_refused_beside_a_low_rank_update_of_the_same(self, tmp_path):
        full = {f"{Q}.weight": torch.zeros(WIDTH, WIDTH)}
        one = write_adapter(tmp_path / "one", 1, modules=(DOWN,), saved=full)
        two = write_adapter(tmp_path / "two", 2)
        base, *_ = family(tmp_path / "models", 1)
        for output in ("adapter", "full"):
            content = whole("linear", [one, two], base_model=str(base), output=output)
            assert "base+adapter" in refused(content, tmp_path / "out", PlanError)

    def test_a_bias_beside_an_added_bias_is_not_lost(self, tmp_path):
        name = "model.layers.0.self_attn.q_proj.bias"
        models = family(tmp_path / "models", 1)
        state = load_file(models[0] / "model.safetensors")
        base = write_model(tmp_path / "base", state | {name: torch.zeros(WIDTH)})
        one = write_adapter(tmp_path / "one", 1, saved={name: torch.ones(WIDTH)}, bias="all")
        two = write_adapter(tmp_path / "two", 2, modules=(Q,), lora_bias=True)
        file = two / "adapter_model.safetensors"
        more = {f"base_model.model.{Q}.lora_B.bias": torch.ones(WIDTH)}
        save_file(load_file(file) | more, file)
        content = whole("linear", [one, two], base_model=str(base), output="full")
        assert name in refused(content, tmp_path / "out", PlanError)
        isthmus.merge(content | {"output": "adapter"}, tmp_path / "out")
        state = load_file(tmp_path / "out/adapter_model.safetensors")
        assert torch.allclose(state[f"base_model.model.{Q}.base_layer.bias"], torch.tensor(0.5))
        assert torch.allclose(state[f"base_model.model.{Q}.lora_B.bias"], torch.tensor(1.0))

    def test_what_is_left_out_is_not_announced(self, tmp_path):
        one = write_adapter(
            tmp_path / "one", 1, saved={"score.weight": self.head}, task_type="SEQ_CLS"
        )
        two = write_adapter(
            tmp_path / "two", 2, saved={"score.weight": self.head[:1]}, task_type="SEQ_CLS"
        )
        isthmus.merge(whole("linear", [one, two], tensors="common"), tmp_path / "out")
        config = json.loads((tmp_path / "out/adapter_config.json").read_text())
        assert not config["modules_to_save"]
        assert "task_type" not in config

    def test_of_different_shapes_is_refused(self, tmp_path):
        one = write_adapter(tmp_path / "one", 1, saved={"score.weight": self.head})
        two = write_adapter(tmp_path / "two", 2, saved={"score.weight": self.head[:1]})
        message = refused(whole("linear", [one, two]), tmp_path / "out", PlanError)
        assert "different shapes" in message


def test_an_interrupted_merge_goes_on_to_the_same_bytes(three, tmp_path, monkeypatch):
    from isthmus.engine.module_merge import ModuleMerge

    content = whole("linear", three, rank=1)
    isthmus.merge(content, tmp_path / "whole")
    run = ModuleMerge.run

    def fail_at_down(self):
        if self.module == DOWN:
            raise KeyboardInterrupt
        return run(self)

    monkeypatch.setattr(ModuleMerge, "run", fail_at_down)
    with pytest.raises(KeyboardInterrupt):
        isthmus.merge(content, tmp_path / "cut", workers=1)
    assert not (tmp_path / "cut/adapter_config.json").exists()
    monkeypatch.setattr(ModuleMerge, "run", run)
    outcome = isthmus.merge(content, tmp_path / "cut", resume=True)
    assert outcome.resumed == 2
    left, right = contents(tmp_path / "whole"), contents(tmp_path / "cut")
    assert left["adapter_model.safetensors"] == right["adapter_model.safetensors"]
    notes = [json.loads(c["isthmus-manifest.json"])["notes"] for c in (left, right)]
    assert notes[0] == notes[1]


def test_shards_as_transformers_writes_them(three, tmp_path):
    isthmus.merge(whole("linear", three), tmp_path / "plain")
    file = three[0] / "adapter_model.safetensors"
    state = load_file(file)
    file.unlink()
    halves = [dict(list(state.items())[:2]), dict(list(state.items())[2:])]
    weight_map = {}
    for number, half in enumerate(halves, start=1):
        shard = f"adapter_model-0000{number}-of-00002.safetensors"
        save_file(half, three[0] / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(half, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (three[0] / "model.safetensors.index.json").write_text(json.dumps(index))
    isthmus.merge(whole("linear", three), tmp_path / "sharded")
    close(updates(tmp_path / "sharded"), updates(tmp_path / "plain"))


class TestRefusals:
    def test_adapters_of_different_bases(self, tmp_path):
        one = write_adapter(tmp_path / "one", 1)
        two = write_adapter(tmp_path / "two", 2, base_model_name_or_path="other")
        message = refused(whole("linear", [one, two]), tmp_path / "out", PlanError)
        assert "tiny" in message
        assert "other" in message

    def test_a_linear_module_and_a_convolution(self, tmp_path):
        one = write_adapter(tmp_path / "one", 1, modules=(Q,))
        two = write_adapter(tmp_path / "two", 2, modules=(Q,))
        path = two / "adapter_model.safetensors"
        state = {name: tensor[..., None, None] for name, tensor in load_file(path).items()}
        save_file(state, path, {"format": "pt"})
        message = refused(whole("linear", [one, two]), tmp_path / "out", PlanError)
        assert "linear of shape [16, 16] in" in message
        assert "a convolution of kernel [1, 1], shape [16, 16] in" in message

    def test_a_model_among_adapters(self, three, tmp_path):
        base, *_ = family(tmp_path / "models", 1)
        message = refused(whole("linear", [three[0], base]), tmp_path / "out", PlanError)
        assert "base+" in message

    def test_methods_that_merge_no_adapters(self, three, tmp_path):
        content = recipe("slerp", three[:2], base_model=str(three[0]), parameters={"t": 0.5})
        assert "does not merge adapters" in refused(content, tmp_path / "out", PlanError)

    def test_methods_for_adapters_alone(self, tmp_path):
        models = family(tmp_path / "models", 2)
        message = refused(recipe("cat", models[1:]), tmp_path / "out", PlanError)
        assert "extract" in message

    def test_keys_for_adapters_alone(self, tmp_path):
        models = family(tmp_path / "models", 2)
        content = recipe("linear", models[1:], rank=4)
        assert "rank" in refused(content, tmp_path / "out", PlanError)

    def test_spaces_that_the_method_lacks(self, three, tmp_path):
        content = whole("linear", three, space="quotient")
        assert "core" in refused(content, tmp_path / "out", RecipeError)
        content = whole("core_ties", three, space="full")
        assert "core" in refused(content, tmp_path / "out", RecipeError)

    @pytest.mark.parametrize("rank", [0, -1, "two", 1.5])
    def test_ranks_that_are_none(self, three, tmp_path, rank):
        assert "rank" in refused(whole("linear", three, rank=rank), tmp_path / "out", RecipeError)

    def test_ranks_beyond_the_matrix(self, three, tmp_path):
        message = refused(whole("linear", three, rank=99), tmp_path / "out", PlanError)
        assert "99" in message
        assert f"Ask for {WIDTH}" in message

    def test_a_rank_for_cat(self, three, tmp_path):
        assert "cat" in refused(whole("cat", three, rank=3), tmp_path / "out", PlanError)

    @pytest.mark.parametrize("output", ["adapter", "full"])
    def test_a_base_of_another_width(self, three, tmp_path, output):
        state = {f"{m}.weight": torch.zeros(8, 8) for m in SHAPES} | {"x": torch.zeros(1)}
        base = write_model(tmp_path / "narrow", state)
        content = whole("linear", three, base_model=str(base), output=output)
        message = refused(content, tmp_path / "out")
        assert "trained on another model" in message

    def test_whole_output_without_a_base(self, three, tmp_path):
        content = whole("linear", three, output="full")
        assert "base_model" in refused(content, tmp_path / "out", PlanError)

    def test_not_finite_numbers(self, three, tmp_path):
        file = three[1] / "adapter_model.safetensors"
        state = load_file(file)
        state[f"base_model.model.{Q}.lora_A.weight"][0, 0] = torch.nan
        save_file(state, file)
        message = refused(whole("linear", three), tmp_path / "out", NonFiniteError)
        assert "two" in message
        assert Q in message

    def test_modules_of_other_shapes(self, tmp_path, monkeypatch):
        one = write_adapter(tmp_path / "one", 1)
        monkeypatch.setitem(SHAPES, Q, (WIDTH, WIDTH + 1))
        two = write_adapter(tmp_path / "two", 2)
        message = refused(whole("linear", [one, two]), tmp_path / "out", PlanError)
        assert Q in message

    def test_negative_weights_where_they_mean_nothing(self, three, tmp_path):
        content = whole("geomerge", three, [1.0, -1.0, 1.0])
        refused(content, tmp_path / "out", (MethodError, PlanError, RecipeError))

    @pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
    def test_half_an_adapter(self, three, tmp_path, missing):
        (three[0] / missing).unlink()
        message = refused(whole("linear", three), tmp_path / "out")
        assert missing in message
        assert "one" in message
