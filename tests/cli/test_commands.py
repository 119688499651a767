"""The command line as people use it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from isthmus.cli.main import app
from isthmus.errors import IsthmusError
from isthmus.methods.registry import METHODS

from ..engine.models import contents, family, llama_state, recipe, write_model


@pytest.fixture
def models(tmp_path):
    return family(tmp_path / "models")


@pytest.fixture
def recipe_file(models, tmp_path):
    path = tmp_path / "recipe.yaml"
    content = recipe("ties", models[1:], models[0], parameters={"density": 0.5})
    path.write_text(yaml.safe_dump(content))
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_help_teaches_and_names_every_command():
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("merge", "inspect", "calibrate", "methods", "verify", "demo"):
        assert command in result.stdout
    assert "merge_method: ties" in invoke("merge", "--help").stdout


def test_help_loads_neither_torch_nor_numpy():
    code = (
        "import sys; from isthmus.cli.main import app; import isthmus\n"
        "print([m for m in ('torch', 'numpy', 'numba', 'transformers', 'pydantic') "
        "if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_a_merge_of_safetensors_loads_no_torch(models, tmp_path):
    content = recipe("linear", models[1:])
    code = (
        "import sys, json, isthmus\n"
        f"isthmus.merge(json.loads({json.dumps(json.dumps(content))}), {str(tmp_path / 'o')!r})\n"
        "print([m for m in ('torch', 'numba', 'transformers') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_merge_then_verify(recipe_file, tmp_path):
    out = tmp_path / "out"
    result = invoke("merge", recipe_file, out)
    assert result.exit_code == 0, result.output
    assert "12 tensors merged, 0 copied\n" in result.stdout
    again = invoke("merge", recipe_file, out, "--resume")
    assert "12 tensors merged, 0 copied; complete already, nothing to do\n" in again.stdout
    assert invoke("verify", out).exit_code == 0
    (out / "config.json").write_text("{}")
    broken = invoke("verify", out)
    assert broken.exit_code == 1
    assert "config.json" in broken.output
    data = json.loads(invoke("verify", out, "--json").stdout)
    assert data["problems"]


def test_json_is_json_and_nothing_else(recipe_file, tmp_path):
    plan = json.loads(invoke("merge", recipe_file, tmp_path / "out", "--dry-run", "--json").stdout)
    tensor = plan["tensors"][1]
    assert tensor["action"] == "ties"
    assert tensor["parameters"]["density"] == [0.5, 0.5, 0.5]
    assert [entry["model"].rsplit("/", 1)[1] for entry in tensor["inputs"]] == [
        "base",
        "expert1",
        "expert2",
        "expert3",
    ]
    done = json.loads(invoke("merge", recipe_file, tmp_path / "out", "--json").stdout)
    assert done["merged"] == len(plan["tensors"])


def test_a_dry_run_writes_nothing(recipe_file, tmp_path):
    before = contents(tmp_path)
    result = invoke("merge", recipe_file, tmp_path / "out", "--dry-run")
    assert result.exit_code == 0
    assert "nothing was written" in result.stdout
    assert contents(tmp_path) == before


def test_a_dry_run_shows_inputs_method_and_parameters_by_module(models, tmp_path):
    content = recipe("ties", models[1:3], models[0], dtype="bfloat16")
    content["parameters"] = {"lambda": 0.7, "density": 0.2}
    for entry, weight in zip(content["models"], ([0.0, 1.0], [1.0, 0.0, 1.0]), strict=True):
        entry["parameters"] = {"weight": weight}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    shown = invoke("merge", path, tmp_path / "out", "--dry-run", "--workers", 1).stdout
    assert f"  base: {models[0]}\n  1: {models[1]}\n  2: {models[2]}\n" in shown
    assert "in 1 file; buffers about" in shown
    assert "for 1 worker\n" in shown
    assert "everywhere: density 0.2, lambda 0.7, normalize true" in shown
    rows = {
        line.split()[0]: line.split(maxsplit=4)[1:]
        for line in shown.splitlines()
        if "ties:" in line
    }
    del rows["ties:"]
    assert rows == {
        "lm_head": ["bfloat16", "40x16", "1", "ties: weight (0, 1)"],
        "model.embed_tokens": ["bfloat16", "40x16", "1", "ties: weight (0, 1)"],
        "model.layers.*.input_layernorm": ["bfloat16", "16", "3", "ties: weight (0→1, 0…1)"],
        "model.layers.*.mlp.down_proj": ["bfloat16", "16x48", "3", "ties: weight (0→1, 0…1)"],
        "model.layers.*.self_attn.q_proj": ["bfloat16", "16x16", "3", "ties: weight (0→1, 0…1)"],
        "model.norm": ["bfloat16", "16", "1", "ties: weight (0, 1)"],
    }
    every = invoke("merge", path, tmp_path / "out", "--dry-run", "--all").stdout
    for line in (
        "model.layers.0.mlp.down_proj.weight     bfloat16  16x48  ties: weight (0, 1)",
        "model.layers.1.mlp.down_proj.weight     bfloat16  16x48  ties: weight (0.5, 0)",
        "model.layers.2.mlp.down_proj.weight     bfloat16  16x48  ties: weight 1",
    ):
        assert line in every.splitlines()


def test_a_dry_run_says_what_is_copied_and_why(tmp_path):
    states = [llama_state(0), llama_state(1, noise_of=0)]
    for state in states:
        state["steps"] = torch.zeros((), dtype=torch.int64)
    models = [write_model(tmp_path / str(number), state) for number, state in enumerate(states)]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe("linear", models)))
    shown = invoke("merge", path, tmp_path / "out", "--dry-run").stdout
    assert re.search(r"^steps +int64 +scalar +1  copied: not a floating-point tensor$", shown, re.M)
    assert "everywhere: weight 1, normalize true\n" in shown


def test_a_dry_run_looks_at_the_output_folder(recipe_file, models, tmp_path):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").touch()
    for out, part in ((foreign, "foreign"), (models[0], "holds the input")):
        for options in ([], ["--json"]):
            result = invoke("merge", recipe_file, out, "--dry-run", *options)
            assert isinstance(result.exception, IsthmusError)
            assert part in str(result.exception)
    done = tmp_path / "done"
    assert invoke("merge", recipe_file, done).exit_code == 0
    assert invoke("merge", recipe_file, done, "--dry-run").exit_code == 1
    assert invoke("merge", recipe_file, done, "--dry-run", "--overwrite").exit_code == 0


def test_a_dry_run_looks_at_the_disk(recipe_file, tmp_path, monkeypatch):
    class Full:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda _: Full)
    result = invoke("merge", recipe_file, tmp_path / "out", "--dry-run")
    assert "10 left" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["merge", "absent.yaml", "out"], "absent.yaml"),
        (["verify", "absent"], "absent"),
        (["methods", "tise"], "ties"),
        (["inspect", "./absent"], "absent"),
    ],
)
def test_errors_name_the_cause(arguments, part):
    result = invoke(*arguments)
    assert isinstance(result.exception, IsthmusError)
    assert part in str(result.exception)


def test_the_program_prints_errors_without_a_traceback(tmp_path):
    shown = subprocess.run(
        [sys.executable, "-m", "isthmus", "merge", "absent.yaml", str(tmp_path / "o")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 1
    assert shown.stderr.startswith("error: ")
    assert "Traceback" not in shown.stderr


def test_shard_sizes_are_read_as_people_write_them(recipe_file, tmp_path):
    invoke("merge", recipe_file, tmp_path / "out", "--max-shard-size", "4kB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    bad = invoke("merge", recipe_file, tmp_path / "bad", "--max-shard-size", "huge")
    assert "huge" in str(bad.exception)


def test_methods_lists_and_explains():
    listed = invoke("methods").stdout
    for name in ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "slerp"):
        assert f"\n{name}\n" in f"\n{listed}"
    assert "2306.01708" in listed
    explained = invoke("methods", "ties").stdout
    assert "density = 1.0" in explained
    assert "FusionBench" in explained
    data = json.loads(invoke("methods", "ties", "--json").stdout)
    assert {p["name"] for p in data[0]["parameters"]} >= {"weight", "density", "lambda"}


def test_methods_tell_where_adapters_are_merged():
    assert "adapters: space: full (default), core, knots" in invoke("methods", "ties").stdout
    assert "does not depend on the factorisation" in invoke("methods", "ties").stdout
    assert "adapters: nothing else; space: core" in invoke("methods", "cat").stdout
    assert "adapters: not merged; apply them to their base" in invoke("methods", "slerp").stdout
    assert invoke("methods").stdout.count("\n  adapters: ") == len(METHODS)
    (data,) = json.loads(invoke("methods", "cat", "--json").stdout)
    assert (data["spaces"], data["adapters_only"]) == (["core"], True)
    assert data["gauge"]


def test_inspect_describes_one_model(models):
    data = json.loads(invoke("inspect", models[0], "--json").stdout)
    (summary,) = data["models"]
    states = load_file(models[0] / "model.safetensors")
    assert summary["parameters"] == sum(tensor.numel() for tensor in states.values())
    assert summary["elements_by_dtype"] == {"float32": summary["parameters"]}
    assert "LlamaForCausalLM" in invoke("inspect", models[0]).stdout


def test_inspect_measures_task_vectors(models):
    result = invoke("inspect", *models, "--json")
    assert result.exit_code == 0
    comparison = json.loads(result.stdout)["comparison"]
    base, *experts = (load_file(path / "model.safetensors") for path in models)

    def flat(state, part=""):
        return torch.cat(
            [t.double().flatten() for name, t in sorted(state.items()) if part in name]
        )

    deltas = [flat(expert) - flat(base) for expert in experts]
    for number, delta in enumerate(deltas):
        assert comparison["total"]["relative_distances"][number] == pytest.approx(
            float(delta.norm() / flat(base).norm()), rel=1e-6
        )
    expected = float(torch.cosine_similarity(deltas[0], deltas[1], dim=0))
    assert comparison["total"]["cosines"][0][1] == pytest.approx(expected, abs=1e-6)
    module = comparison["modules"]["model.layers.*.mlp.down_proj"]
    part = flat(experts[2], "down_proj") - flat(base, "down_proj")
    assert module["relative_distances"][2] == pytest.approx(
        float(part.norm() / flat(base, "down_proj").norm()), rel=1e-6
    )
    assert comparison["mergeable"] is True
    assert "can be merged" in invoke("inspect", *models).stdout


def test_inspect_says_why_models_do_not_merge(models, tmp_path):
    state = llama_state(9)
    state["lm_head.weight"] = torch.zeros(50, 16)
    odd = write_model(tmp_path / "odd", state)
    result = invoke("inspect", models[0], odd)
    assert result.exit_code == 1
    assert "lm_head.weight has shape [50, 16]" in result.stdout
    data = json.loads(invoke("inspect", models[0], odd, "--json").stdout)
    assert data["comparison"]["mergeable"] is False


def test_inspect_of_the_base_with_itself_has_no_direction(models):
    data = json.loads(invoke("inspect", models[0], models[0], models[1], "--json").stdout)
    assert data["comparison"]["total"]["relative_distances"][0] == 0
    assert data["comparison"]["total"]["cosines"][0][1] is None


def strict(text):
    """JSON as the standard has it, without NaN and Infinity."""

    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_inspect_cuts_no_name_and_numbers_the_models(tmp_path, models):
    states = [load_file(path / "model.safetensors") for path in models[:3]]
    long = "model.layers.3." + "very_long_name." * 8
    wide = [
        write_model(tmp_path / str(number), {long + "weight": state["lm_head.weight"] * 2, **state})
        for number, state in enumerate(states)
    ]
    shown = invoke("inspect", *wide).stdout
    assert long.replace(".3.", ".*.").removesuffix(".") in shown
    assert f"  1: {wide[1]}\n  2: {wide[2]}\n" in shown
    assert re.search(r"^module +parameters +1 +2 +cos 1,2$", shown, re.M)
    assert "in 13 tensors, float32; " in shown
    assert "in 1 file\n" in shown


def test_inspect_folds_on_a_terminal(models, monkeypatch):
    monkeypatch.setattr("isthmus.cli.inspect.room", lambda: 60)
    shown = invoke("inspect", *models[:3]).stdout
    assert max(map(len, shown.partition("module ")[2].splitlines())) <= 60


def test_inspect_counts_the_modules_that_it_leaves_out(tmp_path):
    names = [f"part_{chr(97 + number)}.weight" for number in range(11)]
    base = write_model(tmp_path / "a", {name: torch.ones(2) for name in names})
    other = write_model(tmp_path / "b", {name: torch.full((2,), 1.1) for name in names})
    assert "\n1 more module (--all)\n" in invoke("inspect", base, other).stdout
    assert "--all" not in invoke("inspect", base, other, "--all").stdout


def test_inspect_doubts_models_that_are_strangers(models, tmp_path):
    stranger = write_model(tmp_path / "stranger", llama_state(77))
    result = invoke("inspect", *models[:2], stranger)
    assert result.exit_code == 0
    assert "can be merged" in result.stdout
    assert (
        "model 2 is farther from the base than the base is from zero: probably not a fine-tune of "
        "it, and merging will likely fail"
    ) in result.stdout
    comparison = json.loads(invoke("inspect", *models[:2], stranger, "--json").stdout)["comparison"]
    assert comparison["related"] is False
    assert comparison["unrelated"] == [str(stranger)]
    kin = json.loads(invoke("inspect", *models, "--json").stdout)["comparison"]
    assert kin["related"] is True
    assert kin["unrelated"] == []


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("first", ["huge", "base"])
def test_inspect_of_numbers_whose_squares_overflow(models, tmp_path, first):
    state = {
        name: torch.full_like(tensor, -1e200 if tensor.ndim == 1 else 1.7e308, dtype=torch.float64)
        for name, tensor in llama_state(0).items()
    }
    pair = [write_model(tmp_path / "huge", state), models[0]]
    if first == "base":
        pair.reverse()
    comparison = strict(invoke("inspect", *pair, "--json").stdout)["comparison"]
    assert comparison["total"]["relative_distances"] == [None]
    assert comparison["total"]["cosines"] == [[None]]
    assert comparison["related"] is None
    if first == "huge":
        assert comparison["total"]["base_norm"] is None
    shown = invoke("inspect", *pair).stdout
    assert re.search(r"^everything +4,416 +–$", shown, re.M)
    assert "nan" not in shown


def test_inspect_shows_a_dash_where_there_is_no_direction(models):
    shown = invoke("inspect", models[0], models[0], models[1]).stdout
    assert re.search(r"^everything +4,416  0.0000  0.1\d+ +–$", shown, re.M)
    assert "nan" not in shown


@pytest.mark.parametrize(
    ("architectures", "shown"), [([1, 2], "1, 2; "), ("Odd", "Odd; "), ({"a": 1}, "{'a': 1}; ")]
)
def test_inspect_takes_any_architectures(tmp_path, architectures, shown):
    model = write_model(tmp_path / "m", llama_state(0), architectures=architectures)
    result = invoke("inspect", model)
    assert result.exit_code == 0
    assert shown in result.stdout


def test_inspect_advises_what_it_can_do_about_nan(models, tmp_path):
    state = llama_state(0)
    state["lm_head.weight"][0, 0] = float("nan")
    result = invoke("inspect", models[0], write_model(tmp_path / "broken", state))
    assert isinstance(result.exception, IsthmusError)
    assert "lm_head.weight holds nan at (0, 0)" in str(result.exception)
    assert "--allow-nonfinite" not in str(result.exception)
    assert "distances to it do not exist" in str(result.exception)
