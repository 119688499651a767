"""Merging files: what comes out, whatever the format, the workers and the history."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import isthmus
from isthmus.engine.verify import verify
from isthmus.errors import CheckpointError

from .models import LAYERS, contents, family, llama_state, recipe, write_model

METHODS_WITH_BASE = ["task_arithmetic", "ties", "dare_linear", "dare_ties"]


@pytest.fixture
def models(tmp_path):
    return family(tmp_path)


def merged(out):
    state = {}
    for file in sorted(out.glob("*.safetensors")):
        state |= load_file(file)
    return state


def test_linear_is_the_average(models, tmp_path):
    outcome = isthmus.merge(recipe("linear", models[1:]), tmp_path / "out")
    states = [load_file(path / "model.safetensors") for path in models[1:]]
    result = merged(tmp_path / "out")
    assert list(result) == list(states[0])
    for name, tensor in result.items():
        expected = torch.stack([state[name].double() for state in states]).mean(0)
        assert torch.allclose(tensor.double(), expected, atol=1e-6), name
    assert outcome.merged == len(states[0])
    assert outcome.carried == 0


@pytest.mark.parametrize("method", [*METHODS_WITH_BASE, "linear"])
def test_files_and_memory_give_the_same_bytes(method, models, tmp_path):
    base = models[0] if method in METHODS_WITH_BASE else None
    names = [str(path) for path in models[1:]]
    density = {"parameters": {"density": 0.4}} if base else {}
    isthmus.merge(recipe(method, models[1:], base, **density), tmp_path / "out")
    in_memory = isthmus.merge_state_dicts(
        {name: load_file(f"{name}/model.safetensors") for name in names},
        base=None if base is None else load_file(base / "model.safetensors"),
        method=method,
        **({"density": 0.4} if base else {}),
    )
    for name, tensor in merged(tmp_path / "out").items():
        assert torch.equal(tensor, in_memory[name]), name


@pytest.mark.parametrize("method", METHODS_WITH_BASE)
def test_workers_shards_and_order_of_work_do_not_change_a_byte(method, models, tmp_path):
    content = recipe(method, models[1:], models[0], parameters={"density": 0.5}, seed=3)
    results = {}
    for workers in (1, 2, 4):
        out = tmp_path / f"out{workers}" / "merged"
        isthmus.merge(content, out, workers=workers, max_shard_size=4000)
        results[workers] = contents(out)
    assert len([name for name in results[1] if name.endswith(".safetensors")]) > 3
    assert results[1] == results[2] == results[4]


def test_a_random_method_depends_on_its_seed(models, tmp_path):
    def weights(seed, out):
        content = recipe("dare_linear", models[1:], models[0], parameters={"density": 0.5})
        isthmus.merge(content | {"seed": seed}, tmp_path / out)
        return (tmp_path / out / "model.safetensors").read_bytes()

    assert weights(1, "a") == weights(1, "b") != weights(2, "c")


def test_shards_have_the_hubs_layout(models, tmp_path):
    isthmus.merge(recipe("linear", models[1:]), tmp_path / "out", max_shard_size=4000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    for file in files:
        state = load_file(tmp_path / "out" / file)
        assert all(index["weight_map"][name] == file for name in state)
    total = sum(t.numel() * t.element_size() for t in merged(tmp_path / "out").values())
    assert index["metadata"]["total_size"] == total


def test_dtypes_convert_and_the_config_says_so(models, tmp_path):
    isthmus.merge(recipe("linear", models[1:], dtype="bfloat16"), tmp_path / "out")
    states = [load_file(path / "model.safetensors") for path in models[1:]]
    for name, tensor in merged(tmp_path / "out").items():
        exact = torch.stack([state[name].double() for state in states]).mean(0)
        assert tensor.dtype == torch.bfloat16
        # Rounded once, at the end.
        assert torch.allclose(tensor.double(), exact, rtol=2**-8, atol=1e-7), name
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))


def test_float64_is_merged_in_float64(tmp_path):
    paths = family(tmp_path, dtype=torch.float64)
    isthmus.merge(recipe("linear", paths[1:]), tmp_path / "out")
    states = [load_file(path / "model.safetensors") for path in paths[1:]]
    for name, tensor in merged(tmp_path / "out").items():
        expected = torch.stack([state[name] for state in states]).mean(0)
        assert torch.allclose(tensor, expected, rtol=1e-15, atol=1e-15), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_narrow_formats_are_read_and_written(dtype, tmp_path):
    paths = family(tmp_path, dtype=dtype)
    isthmus.merge(recipe("linear", paths[1:]), tmp_path / "out")
    states = [load_file(path / "model.safetensors") for path in paths[1:]]
    for name, tensor in merged(tmp_path / "out").items():
        exact = torch.stack([state[name].float() for state in states]).mean(0)
        assert tensor.dtype == dtype
        assert torch.equal(tensor.float(), exact.to(dtype).float()), name


def test_gradients_and_filters_reach_the_tensors_they_name(models, tmp_path):
    content = recipe("linear", models[1:3])
    content["models"][0]["parameters"] = {
        "weight": [{"filter": "q_proj", "value": [0.0, 1.0]}, {"value": 0.25}]
    }
    content["models"][1]["parameters"] = {
        "weight": [{"filter": "q_proj", "value": [1.0, 0.0]}, {"value": 0.75}]
    }
    isthmus.merge(content, tmp_path / "out")
    one, two = (load_file(path / "model.safetensors") for path in models[1:3])
    result = merged(tmp_path / "out")
    for layer in range(LAYERS):
        name, share = f"model.layers.{layer}.self_attn.q_proj.weight", layer / (LAYERS - 1)
        expected = share * one[name] + (1 - share) * two[name]
        assert torch.allclose(result[name], expected, atol=1e-6), layer
    name = "model.embed_tokens.weight"
    assert torch.allclose(result[name], 0.25 * one[name] + 0.75 * two[name], atol=1e-6)


def test_other_formats_and_prefixes_merge_to_the_same_numbers(models, tmp_path):
    """Sharded safetensors, one torch file, names without prefix, base+nothing: one result."""
    states = [load_file(path / "model.safetensors") for path in models]
    isthmus.merge(recipe("ties", models[1:], models[0]), tmp_path / "plain")
    torch_folder = tmp_path / "torch"
    torch_folder.mkdir()
    torch.save(states[1], torch_folder / "pytorch_model.bin")
    bare = write_model(
        tmp_path / "bare", {k.removeprefix("model."): v for k, v in states[2].items()}
    )
    half = len(states[3]) // 2
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    names = list(states[3])
    weight_map = {}
    for number, part in enumerate((names[:half], names[half:]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: states[3][name] for name in part}, sharded / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    isthmus.merge(recipe("ties", [torch_folder, bare, sharded], models[0]), tmp_path / "mixed")
    plain, mixed = merged(tmp_path / "plain"), merged(tmp_path / "mixed")
    assert all(torch.equal(plain[name], mixed[name]) for name in plain)


def test_what_is_not_float_comes_from_the_base_and_differences_are_named(tmp_path):
    paths = []
    for number in range(3):
        state = llama_state(number) | {
            "step": torch.tensor(number),
            "same": torch.arange(4),
            "mask": torch.tensor([True, False]),
        }
        paths.append(write_model(tmp_path / f"m{number}", state))
    outcome = isthmus.merge(recipe("ties", paths[1:], paths[0]), tmp_path / "out")
    result = merged(tmp_path / "out")
    assert result["step"] == 0
    assert torch.equal(result["same"], torch.arange(4))
    assert outcome.carried == 3
    differing = [note for note in outcome.notes if "differs" in note]
    assert len(differing) == 1
    assert "step" in differing[0]
    assert "m1" in differing[0]
    assert "m2" in differing[0]


def test_a_tied_head_stays_tied(tmp_path):
    paths = []
    for number in range(3):
        state = llama_state(number)
        if number != 1:  # this one stores the head that its config ties
            del state["lm_head.weight"]
        else:
            state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
        paths.append(write_model(tmp_path / f"m{number}", state, tie_word_embeddings=True))
    isthmus.merge(recipe("linear", paths), tmp_path / "out")
    assert "lm_head.weight" not in merged(tmp_path / "out")


def test_names_that_only_the_file_ties_stay_tied(tmp_path):
    """As safetensors.torch.save_model and load_model tie them."""
    paths = []
    for number in range(2):
        state = llama_state(number)
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
        folder = tmp_path / f"m{number}"
        folder.mkdir()
        torch.save(state, folder / "pytorch_model.bin")
        paths.append(folder)
    isthmus.merge(recipe("linear", paths), tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["lm_head.weight"] == "model.embed_tokens.weight"
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    again = isthmus.merge(recipe("passthrough", [tmp_path / "out"]), tmp_path / "again")
    assert again.merged == len(llama_state(0)) - 1


def test_sidecars_are_looked_at_before_anything_is_merged(models, tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (models[1] / "tokenizer.json").symlink_to(secret)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        isthmus.merge(recipe("linear", models[1:]), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_common_merges_what_is_shared_and_says_what_is_not(tmp_path):
    base, expert = llama_state(0), llama_state(1, noise_of=0)
    expert["score.weight"] = torch.randn(2, 16)
    expert["lm_head.weight"] = torch.randn(50, 16)
    del expert["model.norm.weight"]
    one, two = write_model(tmp_path / "base", base), write_model(tmp_path / "expert", expert)
    outcome = isthmus.merge(recipe("ties", [two], one, tensors="common"), tmp_path / "out")
    result = merged(tmp_path / "out")
    assert torch.equal(result["lm_head.weight"], base["lm_head.weight"])
    assert torch.equal(result["model.norm.weight"], base["model.norm.weight"])
    assert "score.weight" not in result
    assert torch.allclose(
        result["model.embed_tokens.weight"], expert["model.embed_tokens.weight"], atol=1e-6
    )
    assert any("score.weight" in note for note in outcome.notes)


def test_passthrough_copies_every_byte(models, tmp_path):
    isthmus.merge(recipe("passthrough", models[1:2]), tmp_path / "out")
    before, after = load_file(models[1] / "model.safetensors"), merged(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_tensor_of_several_chunks_is_merged_whole(tmp_path):
    from isthmus.engine.devices import CACHE_CHUNK

    size = 2 * CACHE_CHUNK + 12_345
    draw = torch.Generator().manual_seed(0)
    states = [{"layers.0.w": torch.randn(size, generator=draw)} for _ in range(3)]
    paths = [write_model(tmp_path / f"m{i}", state) for i, state in enumerate(states)]
    content = recipe("ties", paths[1:], paths[0], parameters={"density": 0.1})
    isthmus.merge(content, tmp_path / "out")
    base, *experts = (state["layers.0.w"].numpy() for state in states)
    deltas = []
    for expert in experts:
        delta = expert - base
        threshold = np.partition(np.abs(delta), size - size // 10)[size - size // 10]
        deltas.append(np.where(np.abs(delta) >= threshold, delta, 0))
    total = sum(deltas)
    agree = [np.sign(d) == np.where(total >= 0, 1, -1) for d in deltas]
    expected = base + sum(d * a for d, a in zip(deltas, agree, strict=True)) / np.maximum(
        sum(a.astype(int) for a in agree), 1
    )
    np.testing.assert_allclose(merged(tmp_path / "out")["layers.0.w"].numpy(), expected, atol=1e-6)


def test_the_device_path_gives_the_same_numbers(models, tmp_path, monkeypatch):
    """torch on the processor stands in for an accelerator."""
    from isthmus.engine import plan_models as plan_module
    from isthmus.engine.devices import Torch

    content = recipe("dare_ties", models[1:], models[0], parameters={"density": 0.5})
    isthmus.merge(content, tmp_path / "numpy")
    monkeypatch.setattr(plan_module, "open_device", lambda _: Torch("cpu"))
    isthmus.merge(content, tmp_path / "torch", device="cuda")
    ours, theirs = merged(tmp_path / "numpy"), merged(tmp_path / "torch")
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-6, atol=1e-7), name


def test_the_output_verifies_and_a_flipped_byte_is_found(models, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(recipe("linear", models[1:]), out)
    found = verify(out)
    assert found.problems == ()
    assert found.tensors == len(merged(out))
    weights = out / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    (out / "config.json").write_text("{}")
    problems = verify(out).problems
    assert len(problems) == 2
    assert any("lm_head.weight" in p or "embed_tokens" in p or "norm" in p for p in problems)
    assert any("config.json" in p for p in problems)


def test_the_manifest_holds_no_path_of_this_machine_and_no_time(models, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = [path.relative_to(tmp_path) for path in models[1:]]
    isthmus.merge(recipe("linear", relative), tmp_path / "out")
    manifest = (tmp_path / "out" / "isthmus-manifest.json").read_text()
    assert str(tmp_path) not in manifest
    first = contents(tmp_path / "out")
    isthmus.merge(recipe("linear", relative), tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == first


def test_the_plan_reads_no_numbers_and_writes_nothing(models, tmp_path):
    before = contents(tmp_path)
    with isthmus.plan(recipe("ties", models[1:], models[0], dtype="bfloat16")) as plan:
        assert plan.bytes_to_write > 0
        total = sum((path / "model.safetensors").stat().st_size for path in models)
        assert 0.9 * total < plan.bytes_to_read <= total
        assert plan.peak_memory(2) == 2 * plan.peak_memory(1)
    assert contents(tmp_path) == before
