"""The canonical form: equal recipes, equal text, equal digest."""

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from isthmus.methods.parameters import Scope
from isthmus.methods.registry import METHODS
from isthmus.recipes import load_recipe

TEXT = """\
# how we merged it
merge_method: ties
base_model: b
models:
  - model: {model: {path: a, revision: r}, lora: l}
    parameters: {weight: [1], density: [{filter: "*", value: 0.5}]}
  - {model: b}
dtype: bf16
"""


def scalars(parameter):
    if parameter.choices:
        return st.sampled_from(parameter.choices)
    if parameter.kind is bool:
        return st.booleans()
    low = max(parameter.minimum, -1e9)
    return st.floats(
        low, min(parameter.maximum, 1e9), exclude_min=parameter.open_minimum
    ) | st.sampled_from([1, "1e-3"] if low < 1e-3 else [1, "1e0"])


def settings_of(parameter):
    values = scalars(parameter) | st.lists(scalars(parameter), min_size=1, max_size=4)
    rule = st.fixed_dictionaries({"value": values}, optional={"filter": texts})
    return values | rule | st.lists(rule, min_size=1, max_size=3)


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
references = texts.filter(str.strip)


words = texts.filter(bool)
calibrations = words | st.fixed_dictionaries(
    {"data": words},
    optional={
        "column": words | st.none(),
        "examples": st.integers(1, 500),
        "tokens": st.integers(1, 500),
        "seed": st.integers(-9, 9),
    },
)


@st.composite
def recipes(draw):
    method = METHODS[draw(st.sampled_from(sorted(METHODS)))]

    def parameters(scopes):
        chosen = {
            parameter.name: settings_of(parameter)
            for parameter in method.parameters
            if parameter.scope in scopes
        }
        needed = {
            parameter.name: chosen.pop(parameter.name)
            for parameter in method.parameters
            if parameter.required and parameter.scope in scopes
        }
        return draw(st.fixed_dictionaries(needed, optional=chosen))

    most = method.max_experts or 3
    base = draw(references)
    labels = draw(
        st.lists(
            references.filter(lambda text: text.strip() != base.strip()),
            min_size=method.min_experts,
            max_size=most,
        )
    )
    own = set(Scope) - {Scope.GLOBAL}
    calibration = {"calibration": draw(calibrations)} if method.calibrated else {}
    data = calibration | {
        "merge_method": method.name,
        "base_model": base,
        "models": [{"model": label, "parameters": parameters(own)} for label in labels],
        "parameters": parameters({Scope.GLOBAL}),
    }
    return data | draw(
        st.fixed_dictionaries(
            {},
            optional={
                "name": texts,
                "seed": st.integers(-(2**70), 2**70),
                "tensors": st.sampled_from(["strict", "common"]),
                "dtype": st.sampled_from(["bf16", "float32", None]),
                "out_dtype": st.sampled_from(["fp16", "float64"]),
            },
        )
    )


@given(recipes())
def test_canonical_yaml_loads_as_an_equal_recipe(data):
    recipe = load_recipe(data)
    again = load_recipe(recipe.to_yaml())
    assert again == recipe
    assert hash(again) == hash(recipe)
    assert again.to_yaml() == recipe.to_yaml()
    assert again.digest() == recipe.digest()


@pytest.mark.parametrize(
    "text", ["\x85", "a\u2028b", "a\r\nb\n", " x ", "on", "1e-3", "\ufeff", "\x00"]
)
def test_text_that_yaml_finds_hard(text):
    recipe = load_recipe(TEXT, overrides={"name": text})
    assert load_recipe(recipe.to_yaml()).name == text


def test_canonical_yaml_is_readable():
    assert load_recipe(TEXT).to_yaml() == (
        "merge_method: ties\n"
        "base_model: b\n"
        "models:\n"
        "- model: a@r+l\n"
        "  parameters: {density: 0.5, weight: 1.0}\n"
        "- {model: b}\n"
        "dtype: bfloat16\n"
        "seed: 0\n"
        "tensors: strict\n"
    )


def test_order_and_spelling_do_not_matter():
    recipe = load_recipe(TEXT)
    data = yaml.safe_load(TEXT)
    data["models"][0] = {"parameters": {"density": 0.5, "weight": 1}, "model": "a@r+l"}
    same = load_recipe(dict(reversed(data.items())))
    assert same == recipe
    assert same.to_yaml() == recipe.to_yaml()
    assert re.fullmatch("[0-9a-f]{64}", recipe.digest())


def test_what_differs_is_not_equal():
    recipe = load_recipe(TEXT)
    for change in ({"seed": 1}, {"dtype": "float16"}, {"tensors": "common"}, {"name": "x"}):
        other = load_recipe(TEXT, overrides=change)
        assert other != recipe
        assert other.digest() != recipe.digest()
    assert recipe != TEXT
