"""Which value a tensor gets, and from which seed an expert draws."""

import hashlib
from itertools import permutations

import pytest

from isthmus.errors import RecipeError
from isthmus.methods.registry import METHODS
from isthmus.recipes import Depths, load_recipe, resolve_settings

NAMES = ["embed.w", *(f"h.{i}.{part}" for i in range(5) for part in ("mlp", "attn")), "norm.w"]
DEPTHS = Depths(NAMES)


def resolve(text, name):
    recipe = load_recipe(text)
    return resolve_settings(recipe, recipe.method, name, DEPTHS)


LEVELS = """
merge_method: dare_ties
base_model: b
models:
  - model: one
    parameters:
      weight: {filter: mlp, value: [0, 1]}
      density: 0.9
  - model: b
    parameters: {weight: 100}
  - model: two
parameters:
  weight:
    - {filter: attn, value: 0.3}
    - {filter: mlp, value: 0.4}
    - {value: 0.7}
  density:
    - {filter: norm, value: 0.2}
  lambda: [1, 2]
  rescale: {filter: h.0, value: false}
"""


@pytest.mark.parametrize(
    ("name", "weights", "densities", "factor", "rescale"),
    [
        ("embed.w", (0.7, 0.7), (0.9, 1.0), 1.0, True),
        ("h.0.mlp", (0.0, 0.4), (0.9, 1.0), 1.0, False),
        ("h.1.mlp", (0.25, 0.4), (0.9, 1.0), 1.25, True),
        ("h.4.mlp", (1.0, 0.4), (0.9, 1.0), 2.0, True),
        ("h.2.attn", (0.3, 0.3), (0.9, 1.0), 1.5, True),
        ("norm.w", (0.7, 0.7), (0.9, 0.2), 1.0, True),
    ],
)
def test_model_before_recipe_before_default(name, weights, densities, factor, rescale):
    settings = resolve(LEVELS, name)
    assert settings.per_expert == {"weight": weights, "density": densities}
    assert settings.shared["lambda"] == factor
    assert settings.shared["rescale"] is rescale
    assert settings.shared["normalize"] is False
    assert len(settings.seeds) == 2


@pytest.mark.parametrize("name", METHODS)
def test_every_parameter_of_every_method_is_there(name):
    method = METHODS[name]
    required = {parameter.name: 0.5 for parameter in method.parameters if parameter.required}
    recipe = load_recipe(
        {
            "merge_method": name,
            "base_model": "b",
            "models": [{"model": f"m{i}"} for i in range(method.min_experts)],
            "parameters": required,
        }
        | ({"calibration": "examples.jsonl"} if method.calibrated else {})
    )
    settings = resolve_settings(recipe, method, "h.0.mlp", DEPTHS)
    assert settings.shared.keys() | settings.per_expert.keys() == {
        parameter.name for parameter in method.parameters
    }


def test_filters_that_miss_a_tensor_which_needs_a_value():
    text = (
        "merge_method: ties\nbase_model: b\nmodels: [{model: a}]\n"
        "parameters: {weight: {filter: mlp, value: 1}}\n"
    )
    assert resolve(text, "h.3.mlp").per_expert["weight"] == (1.0,)
    with pytest.raises(RecipeError, match=r"'weight', but none of its filters .* norm\.w\n  Add"):
        resolve(text, "norm.w")


def seeds(labels, name="h.0.mlp", seed=0):
    recipe = load_recipe(
        {
            "merge_method": "dare_linear",
            "base_model": "b",
            "models": [{"model": label} for label in labels],
            "parameters": {"weight": 1},
            "seed": seed,
        }
    )
    return resolve_settings(recipe, recipe.method, name, DEPTHS).seeds


def test_seeds_do_not_depend_on_the_other_models_or_their_order():
    alone = {label: seeds([label])[0] for label in ("a", "c", "d")}
    for order in permutations(alone):
        assert dict(zip(order, seeds(order), strict=True)) == alone
    assert seeds(["b", "a", "b"]) == (alone["a"],)


def test_seeds_differ_by_seed_tensor_model_and_occurrence():
    found = [*seeds(["a", "c", "a"]), *seeds(["a"], "h.1.mlp"), *seeds(["a"], seed=1)]
    assert len(set(found)) == 5
    assert all(0 <= seed < 2**128 for seed in found)
    assert max(found) > 2**100


def test_seeds_never_change():
    # Merges must be repeatable years from now.
    key = rb'[42, "h.4.attn", "mod\u00e8le@main", 0]'
    assert (
        int.from_bytes(hashlib.sha256(key).digest()[:16], "big")
        == 65756982297495662798048672423964508561
    )
    assert seeds(["modèle@main"], "h.4.attn", 42) == (65756982297495662798048672423964508561,)
