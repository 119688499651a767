"""The command line as people use it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from isthmus.cli.main import app
from isthmus.errors import IsthmusError

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
    for command in ("merge", "inspect", "methods", "verify", "demo"):
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
    assert "tensors merged" in result.stdout
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
    assert "model.layers.0.mlp.down_proj.weight  F32 16x48  ties" in result.stdout
    assert "nothing was written" in result.stdout
    assert contents(tmp_path) == before


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
