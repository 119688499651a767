"""What recipes say about calibration data."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.errors import RecipeError
from isthmus.recipes import load_recipe
from isthmus.recipes.calibration import Calibration

HEAD = "merge_method: projection\nbase_model: b\nmodels:\n"


def test_a_models_own_settings_go_before_those_of_all():
    recipe = load_recipe(
        HEAD + "- {model: x, calibration: {data: x.jsonl, tokens: 8}}\n"
        "- {model: y, calibration: y.jsonl}\ncalibration: {tokens: 16, examples: 5}\n"
    )
    found = [recipe.calibration_of(entry) for entry in recipe.models]
    assert found == [
        Calibration(data="x.jsonl", tokens=8, examples=5),
        Calibration(data="y.jsonl", tokens=16, examples=5),
    ]
    assert load_recipe(recipe.to_yaml()) == recipe


def test_one_file_may_serve_all():
    recipe = load_recipe(HEAD + "- x\n- y\ncalibration: all.jsonl\n")
    assert {recipe.calibration_of(entry).data for entry in recipe.models} == {"all.jsonl"}


def test_the_data_counts_in_the_digest():
    texts = [HEAD + f"- {{model: x, calibration: {name}}}\n" for name in ("a", "b")]
    assert load_recipe(texts[0]).digest() != load_recipe(texts[1]).digest()


def test_the_base_needs_no_data():
    recipe = load_recipe(HEAD + "- b\n- {model: x, calibration: x.jsonl}\n")
    assert [entry.model for entry in recipe.experts] == ["x"]


def test_paths_count_from_the_recipes_folder(tmp_path: Path):
    (tmp_path / "x.jsonl").touch()
    found = Calibration(data="x.jsonl")
    assert found.path(tmp_path) == tmp_path / "x.jsonl"
    assert found.path(None) == Path("x.jsonl")
    assert Calibration(data="elsewhere.jsonl").path(tmp_path) == Path("elsewhere.jsonl")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEAD + "- {model: x, calibration: a}\n- y\n", "recipe:5: .*is missing for y"),
        (HEAD + "- {model: x, calibration: 3}\n", "must be the path of examples or a mapping"),
        (HEAD + "- {model: x, calibration: {dat: a}}\n", "did you mean 'data'"),
        (HEAD + "- {model: x, calibration: {qqq: a}}\n", "known are data, column"),
        (HEAD + "- {model: x, calibration: {data: a, examples: 0}}\n", "1 or more, not 0"),
        (HEAD + "- {model: x, calibration: {data: a, tokens: b}}\n", "a whole number, not 'b'"),
        (HEAD + "- {model: x, calibration: {data: 3}}\n", "data must be text, not 3"),
        (
            HEAD + "- {model: x, calibration: {data: a, activations: disk}}\n",
            "one value for all models",
        ),
        (
            HEAD + "- {model: x, calibration: a}\ncalibration: {activations: tape}\n",
            "'float32', 'bfloat16' or 'disk', not 'tape'",
        ),
        (HEAD + "- {model: x, calibration: ''}\n", "data must be text, not ''"),
        (
            "merge_method: linear\nmodels:\n- {model: x, calibration: a, parameters: {weight: 1}}\n",
            "linear does not look at data",
        ),
        (
            "merge_method: linear\nmodels: [x]\nparameters: {weight: 1}\ncalibration: a\n",
            "Remove calibration, or take projection, regmean",
        ),
    ],
)
def test_what_is_wrong(text, said):
    with pytest.raises(RecipeError, match=said):
        load_recipe(text)
