"""Recipes as people post them, and everything that `load_recipe` accepts."""

import pickle
from enum import Enum
from pathlib import Path

import numpy as np
import pytest

from isthmus.errors import RecipeError
from isthmus.recipes import Depths, load_recipe, resolve_settings

SLERP = """\
merge_method: slerp
base_model: org/chat-7b
models:
  - model: org/chat-7b
  - model: org/code-7b
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.5   # everything else
dtype: bfloat16
"""

TIES = """\
models:
  - model: org/base        # no parameters: this is the base
  - model: org/math
    parameters:
      density: [1, 0.7, 0.1]   # a gradient over depth
      weight: 1.0
  - model: org/code@main+./adapters/sql
    parameters:
      density: 0.5
      weight: [0, 0.3, 0.7, 1]
  - model: {model: {path: org/law, revision: 2024-01-01}, lora: {path: ./lora, revision: v2}}
    parameters:
      density: 0.33
      weight:
        - {filter: mlp, value: 0.5}
        - value: 1e-3
merge_method: ties
base_model: org/base
parameters:
  normalize: true
  int8_mask: true
dtype: float16
"""

LINEAR = """\
merge_method: linear
models:
  - {model: ./runs/a, parameters: {weight: 0.3}}
  - {model: ./runs/b, parameters: {weight: 0.7}}
  - {model: ./runs/b, parameters: {weight: 0.1}}
"""

DARE = """\
merge_method: dare_ties
base_model: {path: org/base, revision: abc}
tokenizer_source: base
models:
  - model: {path: org/a}
  - model: {model: org/b}
parameters: {weight: 0.5, density: 0.53}
seed: 7
tensors: common
name: mélange 🦙
dtype: bf16
out_dtype: fp32
"""


def names(recipe):
    return [entry.model for entry in recipe.experts]


def test_slerp():
    recipe = load_recipe(SLERP)
    assert names(recipe) == ["org/code-7b"]
    assert recipe.donor == "org/chat-7b"
    assert recipe.output_dtype == "bfloat16"
    assert recipe.notes == ()


def test_ties():
    recipe = load_recipe(TIES)
    assert names(recipe) == [
        "org/math",
        "org/code@main+./adapters/sql",
        "org/law@2024-01-01+./lora@v2",
    ]
    assert recipe.references == ("org/base", *names(recipe))
    assert recipe.seed == 0
    assert recipe.tensors == "strict"
    assert recipe.output_dtype == "float16"


def test_linear_with_a_model_listed_twice():
    recipe = load_recipe(LINEAR)
    assert names(recipe) == ["./runs/a", "./runs/b", "./runs/b"]
    assert recipe.references == ("./runs/a", "./runs/b")
    assert recipe.donor == "./runs/a"
    assert recipe.output_dtype is None


def test_every_key():
    recipe = load_recipe(DARE)
    assert recipe.base_model == "org/base@abc"
    assert names(recipe) == ["org/a", "org/b"]
    assert recipe.donor == "org/base@abc"
    assert (recipe.seed, recipe.tensors, recipe.name) == (7, "common", "mélange 🦙")
    assert (recipe.dtype, recipe.out_dtype, recipe.output_dtype) == (
        "bfloat16",
        "float32",
        "float32",
    )


def test_keys_without_a_value_are_absent():
    text = "merge_method: linear\nbase_model:\ndtype: null\nseed: ~\nparameters:\nmodels:\n"
    recipe = load_recipe(text + "  - {model: a, parameters: {weight: 1}}\n")
    assert recipe == load_recipe(
        "merge_method: linear\nmodels:\n- {model: a, parameters: {weight: 1}}"
    )


def test_listed_base_of_linear_is_an_ordinary_entry():
    text = "merge_method: linear\nbase_model: b\nparameters: {weight: 1}\nmodels:\n"
    recipe = load_recipe(text + "- model: a\n- model: b\n")
    assert names(recipe) == ["a", "b"]
    assert recipe.donor == "b"
    assert recipe.notes == ()


def test_base_of_linear_that_is_not_listed_is_noted():
    recipe = load_recipe(
        "merge_method: linear\nbase_model: b\nparameters: {weight: 1}\nmodels:\n- model: a\n"
    )
    assert names(recipe) == ["a"]
    assert recipe.references == ("b", "a")
    assert len(recipe.notes) == 1
    assert "b is not among them" in recipe.notes[0]


def test_parameters_of_the_base_are_noted():
    recipe = load_recipe(
        "merge_method: ties\nbase_model: b\nmodels:\n"
        "  - model: b\n    parameters:\n      weight: 1\n"
        "  - model: a\n    parameters: {weight: 1}\n"
    )
    assert names(recipe) == ["a"]
    assert recipe.notes == (
        "recipe:5: parameters of the base model have no effect with ties (models[0].parameters).",
    )


def test_calibration_of_the_base_is_noted():
    recipe = load_recipe(
        "merge_method: projection\nbase_model: b\nmodels:\n"
        "  - model: b\n    calibration: b.jsonl\n"
        "  - model: a\n    calibration: a.jsonl\n"
    )
    assert names(recipe) == ["a"]
    (note,) = recipe.notes
    assert note.startswith("recipe:5: calibration of the base model has no effect with projection")


def test_passthrough_with_one_model_switched_off_in_part():
    recipe = load_recipe(
        "merge_method: passthrough\nmodels:\n- model: a\n  parameters:\n"
        "    scale: [{filter: o_proj, value: 0}, {filter: down_proj, value: 0}]\n"
    )
    depths = Depths(["x.o_proj", "x.q_proj"])
    scales = [
        resolve_settings(recipe, recipe.method, name, depths).per_expert["scale"]
        for name in ("x.o_proj", "x.q_proj")
    ]
    assert scales == [(0.0,), (None,)]


def test_file(tmp_path):
    path = tmp_path / "merge.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + LINEAR.replace("\n", "\r\n").encode())
    recipe = load_recipe(path)
    assert recipe.root == tmp_path
    assert recipe == load_recipe(str(path)) == load_recipe(LINEAR)
    assert load_recipe(LINEAR).root is None


def test_file_errors_name_the_file_as_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("merge.yaml").write_text("merge_method: ties\nmodels: 3\n")
    with pytest.raises(RecipeError, match=r"merge\.yaml:2: models must be a list") as caught:
        load_recipe("merge.yaml")
    assert str(tmp_path) not in str(caught.value)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(RecipeError, match=r"there is no recipe .*gone\.yaml"):
        load_recipe(tmp_path / "gone.yaml")
    with pytest.raises(RecipeError, match="is a folder, but a recipe file is expected") as caught:
        load_recipe(tmp_path)
    assert f"- model: {tmp_path}" in str(caught.value)
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(RecipeError, match=r"cannot be (read|the name of a file)"):
            load_recipe(name)
    (tmp_path / "model.bin").write_bytes(b"\x80\x02\xff")
    with pytest.raises(RecipeError, match="not text in UTF-8"):
        load_recipe(tmp_path / "model.bin")


def test_python_data():
    class Name(str, Enum):  # noqa: UP042
        BASE = "b"

    recipe = load_recipe(
        {
            "merge_method": "task_arithmetic",
            "base_model": Name.BASE,
            "models": ({"model": Path("runs") / "a", "parameters": {"weight": np.float32(0.5)}},),
            "seed": np.int64(3),
        }
    )
    assert recipe == load_recipe(
        "merge_method: task_arithmetic\nbase_model: b\nseed: 3\n"
        "models: [{model: runs/a, parameters: {weight: 0.5}}]\n"
    )


@pytest.mark.parametrize("value", [object(), b"x", {1, 2}, 1j])
def test_python_data_that_no_yaml_holds(value):
    with pytest.raises(RecipeError, match=r"cannot hold a .* \(models\[0\]\.model\)"):
        load_recipe({"merge_method": "linear", "models": [{"model": value}]})


def test_python_keys_are_text():
    with pytest.raises(RecipeError, match="a key must be text, not 3"):
        load_recipe({"merge_method": "linear", 3: 4})


def test_overrides():
    recipe = load_recipe(LINEAR, overrides={"seed": 5, "dtype": "bf16"})
    assert (recipe.seed, recipe.dtype) == (5, "bfloat16")
    with pytest.raises(
        RecipeError, match=r"^recipe: seed must be a whole number, not 'x' \(seed\)"
    ):
        load_recipe("seed: 3\n" + LINEAR, overrides={"seed": "x"})


def test_recipes_travel_between_processes():
    recipe = load_recipe(DARE)
    copy = pickle.loads(pickle.dumps(recipe))
    assert copy == recipe
    assert copy.notes == recipe.notes


def test_huge_lists():
    gradient = [i / 5000 for i in range(5001)]
    models = "".join(f"- {{model: m{i}, parameters: {{weight: 1}}}}\n" for i in range(500))
    recipe = load_recipe(
        f"merge_method: dare_linear\nbase_model: b\nparameters: {{density: {gradient[1:]}}}\n"
        f"models:\n{models}"
    )
    assert len(recipe.experts) == 500
    depths = Depths([f"h.{i}.w" for i in range(5000)])
    settings = resolve_settings(recipe, recipe.method, "h.4321.w", depths)
    assert settings.per_expert["density"] == (4322 / 5000,) * 500
    assert len(set(settings.seeds)) == 500


def test_models_as_plain_text():
    recipe = load_recipe("merge_method: linear\nmodels: [../a, org/b]\nparameters: {weight: 1}\n")
    assert names(recipe) == ["../a", "org/b"]
    assert recipe == load_recipe(
        "merge_method: linear\nmodels: [{model: ../a}, {model: org/b}]\nparameters: {weight: 1}\n"
    )


def test_names_are_kept_as_given():
    recipe = load_recipe(
        {"merge_method": "linear", "models": [" a", "a "], "parameters": {"weight": 1}}
    )
    assert recipe.references == (" a", "a ")
    assert load_recipe(recipe.to_yaml()) == recipe


def test_numbers_too_long_for_text_in_python_data():
    with pytest.raises(RecipeError, match=r"this whole number is too long \(seed\)"):
        load_recipe({"merge_method": "linear", "models": ["a"], "seed": 10**5000})
