"""Models that are moved next to another one before they are merged."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import isthmus
from isthmus.checkpoints import open_checkpoint
from isthmus.engine.verify import verify
from isthmus.errors import PlanError, RecipeError, SymmetryError
from isthmus.models.checkpoint_tensors import symmetries
from tests.symmetry.families import described


def model(folder, name="llama", seed=0, **changes):
    config, auto = described(name, **changes)
    torch.manual_seed(seed)
    network = auto.from_config(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    network.save_pretrained(folder)
    return folder


def transformed(source, folder, seed=1):
    """A copy that computes the same in other coordinates."""
    with open_checkpoint(str(source)) as checkpoint:
        spec = symmetries(checkpoint, "auto").spec
    element = spec.random(torch.Generator().manual_seed(seed))
    tensors = load_file(source / "model.safetensors")
    shutil.copytree(source, folder)
    moved = {
        name: spec.act_on(element, name, x.double()).float().contiguous()
        for name, x in tensors.items()
    }
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tensors(folder):
    return load_file(folder / "model.safetensors")


def apart(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture
def pair(tmp_path):
    a = model(tmp_path / "a")
    return a, transformed(a, tmp_path / "b")


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "bert", "vit"])
def test_a_transformed_copy_comes_back(name, tmp_path):
    a = model(tmp_path / "a", name)
    b = transformed(a, tmp_path / "b")
    outcome = isthmus.align(a, b, tmp_path / "out")
    assert apart(tensors(a), tensors(b)) > 0.1
    assert apart(tensors(a), tensors(tmp_path / "out")) < 1e-4
    assert any("its outputs differ by" in note for note in outcome.notes)
    assert verify(tmp_path / "out").problems == ()


def test_what_it_computes_stays_for_a_model_of_its_own(tmp_path):
    import transformers

    a, b = model(tmp_path / "a"), model(tmp_path / "b", seed=5)
    isthmus.align(a, b, tmp_path / "out")
    ids = torch.arange(12).reshape(2, 6)
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(folder)(ids).logits
        for folder in (b, tmp_path / "out")
    )
    assert torch.allclose(before, after, atol=1e-3 * float(before.detach().abs().max()))
    assert apart(tensors(b), tensors(tmp_path / "out")) > 0.1


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "ties"])
def test_merged_with_its_transformed_copy_a_model_is_itself(method, pair, tmp_path):
    a, b = pair
    recipe = {
        "merge_method": method,
        "models": [{"model": str(b), "parameters": {"weight": 1.0}}],
        "base_model": str(a),
        "align": "weights",
    }
    if method == "linear":
        recipe["models"].append({"model": str(a), "parameters": {"weight": 1.0}})
    isthmus.merge(recipe, tmp_path / "out")
    assert apart(tensors(a), tensors(tmp_path / "out")) < 1e-4


def test_a_plan_says_which_models_will_move(pair):
    a, b = pair
    recipe = {"merge_method": "passthrough", "models": [str(b)], "align": {"to": str(a)}}
    with isthmus.plan(recipe) as plan:
        assert f"moved next to {a} before the merge: {b}" in plan.notes


def test_without_align_it_is_not(pair, tmp_path):
    a, b = pair
    entries = [{"model": str(each), "parameters": {"weight": 1.0}} for each in (a, b)]
    isthmus.merge({"merge_method": "linear", "models": entries}, tmp_path / "out")
    assert apart(tensors(a), tensors(tmp_path / "out")) > 0.1


def test_the_same_bytes_whatever_the_workers_and_after_a_stop(pair, tmp_path, monkeypatch):
    a, b = pair
    recipe = {
        "merge_method": "linear",
        "models": [{"model": str(each), "parameters": {"weight": 1.0}} for each in (a, b)],
        "align": "weights",
    }
    isthmus.merge(recipe, tmp_path / "one", workers=1)
    isthmus.merge(recipe, tmp_path / "two", workers=2)

    from isthmus.engine.worker import Worker

    plain, done = Worker.make, []

    def stopping(self, *arguments):
        if len(done) == 5:
            raise KeyboardInterrupt
        done.append(1)
        return plain(self, *arguments)

    monkeypatch.setattr(Worker, "make", stopping)
    with pytest.raises(KeyboardInterrupt):
        isthmus.merge(recipe, tmp_path / "three", workers=1)
    monkeypatch.setattr(Worker, "make", plain)
    isthmus.merge(recipe, tmp_path / "three", resume=True)
    files = [
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two", "three")
    ]
    assert files[0] == files[1] == files[2]


def test_formats_and_shards_are_those_of_the_moved_model(tmp_path):
    a = model(tmp_path / "a")
    b = transformed(a, tmp_path / "b")
    half = {name: x.bfloat16() for name, x in tensors(b).items()}
    save_file(half, b / "model.safetensors", metadata={"format": "pt"})
    isthmus.align(a, b, tmp_path / "out")
    assert {x.dtype for x in tensors(tmp_path / "out").values()} == {torch.bfloat16}


def test_no_group_on_the_stream(pair, tmp_path):
    a, b = pair
    isthmus.align(a, b, tmp_path / "out", residual="none")
    assert torch.equal(
        tensors(tmp_path / "out")["model.embed_tokens.weight"],
        tensors(b)["model.embed_tokens.weight"],
    )


def test_other_widths(tmp_path):
    a, b = model(tmp_path / "a"), model(tmp_path / "b", intermediate_size=40)
    with pytest.raises(SymmetryError, match=r"'layers.0.mlp' has 40 units.*\n.*Swap the networks"):
        isthmus.align(a, b, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_architectures(tmp_path):
    a, b = model(tmp_path / "a"), model(tmp_path / "b", "gpt2")
    with pytest.raises(SymmetryError, match="has no tensor"):
        isthmus.align(a, b, tmp_path / "out")


def test_an_unknown_family(pair, tmp_path):
    a, b = pair
    for folder in (a, b):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(SymmetryError, match=r"'mamba' are not known here\n.*Known are: llama"):
        isthmus.align(a, b, tmp_path / "out")


def test_no_configuration(pair, tmp_path):
    a, b = pair
    (a / "config.json").unlink()
    with pytest.raises(SymmetryError, match=r"has no config\.json"):
        isthmus.align(a, b, tmp_path / "out")


def test_nan(pair, tmp_path):
    a, b = pair
    broken = tensors(b)
    broken["model.norm.weight"][0] = torch.nan
    save_file(broken, b / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SymmetryError, match=r"'model\.norm\.weight'.*NaN"):
        isthmus.align(a, b, tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_configuration_that_lies_about_the_heads(pair, tmp_path):
    a, b = pair
    for folder in (a, b):
        config = json.loads((folder / "config.json").read_text())
        config |= {"num_attention_heads": 2, "num_key_value_heads": 1}
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SymmetryError, match="shape"):
        isthmus.align(a, b, tmp_path / "out")


def test_statistics_of_a_model_that_moves(pair, tmp_path):
    a, b = pair
    stats = tmp_path / "stats"
    stats.mkdir()
    (stats / "calibration.json").write_text("{}")
    recipe = {
        "merge_method": "regmean",
        "base_model": str(a),
        "models": [{"model": str(b), "calibration": str(stats)}],
        "align": "weights",
    }
    with pytest.raises(PlanError, match="which align moves"):
        isthmus.merge(recipe, tmp_path / "out")


def test_what_a_recipe_can_say_wrong(tmp_path):
    with pytest.raises(RecipeError, match="did you mean 'residual'"):
        isthmus.merge(
            {"merge_method": "linear", "models": ["a"], "align": {"residul": "none"}}, tmp_path
        )
    with pytest.raises(RecipeError, match="by must be 'weights'"):
        isthmus.merge({"merge_method": "linear", "models": ["a"], "align": "magic"}, tmp_path)
    with pytest.raises(RecipeError, match="align must be `weights`"):
        isthmus.merge({"merge_method": "linear", "models": ["a"], "align": 3}, tmp_path)
    with pytest.raises(RecipeError, match="seed must be 0 or more"):
        isthmus.merge({"merge_method": "linear", "models": ["a"], "align": {"seed": -1}}, tmp_path)
    with pytest.raises(RecipeError, match="seed must be below 1099511627776"):
        isthmus.merge(
            {"merge_method": "linear", "models": ["a"], "align": {"seed": 10**20}}, tmp_path
        )


def test_adapters_are_not_moved(tmp_path):
    from .adapters import write_adapter

    folders = [tmp_path / "one", tmp_path / "two"]
    for seed, folder in enumerate(folders):
        write_adapter(folder, seed=seed)
    recipe = {
        "merge_method": "linear",
        "models": [{"model": str(each), "parameters": {"weight": 1.0}} for each in folders],
        "align": "weights",
    }
    with pytest.raises(PlanError, match="these are adapters"):
        isthmus.merge(recipe, tmp_path / "out")
