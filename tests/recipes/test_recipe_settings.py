"""Gradients and filters against a calculation of our own, and depths from names."""

import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.methods.registry import METHODS
from isthmus.recipes import Depths
from isthmus.recipes.document import Document
from isthmus.recipes.problems import Problems
from isthmus.recipes.settings import read_setting

PARAMETERS = {parameter.name: parameter for parameter in METHODS["ties"].parameters}
NAMES = ["embed", "h.0.mlp.up", "h.0.attn.q", "h.1.mlp.up", "h.1.attn.q", "h.2.mlp.up", "norm"]


def setting(raw, name="weight"):
    problems = Problems(Document("f", {}))
    found = read_setting(raw, PARAMETERS[name], ("weight",), problems)
    problems.raise_if_any()
    return found


numbers = st.floats(-1e6, 1e6)
gradients = st.lists(numbers, min_size=1, max_size=9)
depths = st.integers(1, 60).flatmap(
    lambda last: st.integers(0, last).map(lambda index: Fraction(index, last))
)


@given(gradients, depths)
def test_numbers_interpolate(values, depth):
    expected = np.interp(float(depth), np.linspace(0, 1, len(values)), values)
    if len(values) == 1:
        expected = values[0]
    assert setting(values).at("x", depth) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(st.lists(st.floats(1e-3, 1), min_size=1, max_size=9), depths)
def test_interpolation_stays_between_its_ends(values, depth):
    assert min(values) <= setting(values, "density").at("x", depth) <= max(values)


@given(st.floats(1e-3, 1), depths)
def test_a_constant_gradient_is_that_constant(value, depth):
    assert setting([value] * 3).at("x", depth) == value


@pytest.mark.parametrize("layers", [2, 7, 32, 50, 99])
def test_one_value_a_layer_gives_each_layer_its_own(layers):
    # In floating point 49 * (1/49) is less than 1, and the last layer would miss its value.
    depths = Depths(f"h.{i}.w" for i in range(layers))
    flags = [bool(i * i % 3) for i in range(layers)]
    values = [i / 7 for i in range(layers)]
    for i in range(layers):
        assert setting(flags, "normalize").at("w", depths.of(f"h.{i}.w")) is flags[i]
        assert setting(values).at("w", depths.of(f"h.{i}.w")) == values[i]


@given(st.lists(st.booleans(), min_size=1, max_size=9), depths)
def test_truth_values_step(values, depth):
    place = depth.numerator * (len(values) - 1) // depth.denominator
    assert setting(values, "normalize").at("x", depth) is values[place]


def test_text_steps():
    found = setting(["l1", "density"], "rescale_norm")
    assert found.at("x", Fraction(99, 100)) == "l1"
    assert found.at("x", Fraction(1)) == "density"


rules = st.lists(
    st.fixed_dictionaries(
        {"value": st.one_of(numbers, gradients)},
        optional={"filter": st.sampled_from(["mlp", "attn", ".0.", "h.", "*", "", "zzz"])},
    ),
    min_size=1,
    max_size=5,
)


@given(rules, st.sampled_from(NAMES))
def test_the_first_matching_filter_counts(raw, name):
    depth = Depths(NAMES).of(name)
    expected = None
    for rule in raw:
        pattern = rule.get("filter", "*")
        if pattern == "*" or name.find(pattern) >= 0:
            expected = setting(rule["value"]).at(name, depth)
            break
    assert setting(raw).at(name, depth) == expected
    if len(raw) == 1:
        assert setting(raw[0]).at(name, depth) == expected


@given(rules)
def test_settings_read_back_from_their_plain_form(raw):
    found = setting(raw)
    assert setting(found.plain()) == found
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        (1, 1.0),
        ([1], 1.0),
        ([0, "1e-3"], [0.0, 0.001]),
        ({"value": 1}, 1.0),
        ([{"filter": "*", "value": [1, 2]}], [1.0, 2.0]),
        ({"filter": "mlp", "value": [2]}, [{"filter": "mlp", "value": 2.0}]),
        (
            [{"filter": "mlp", "value": 2}, {"value": 1}],
            [{"filter": "mlp", "value": 2.0}, {"value": 1.0}],
        ),
    ],
)
def test_shortest_form(raw, plain):
    assert setting(raw).plain() == plain


def test_depths():
    depths = Depths(
        [
            "model.embed_tokens.weight",
            "model.layers.0.self_attn.q_proj.weight",
            "model.layers.3.mlp.experts.7.w1",
            "model.layers.4.norm.weight",
            "model.norm.weight",
            "lm_head.weight",
            "decoder.block.1.layer.0.k",
            "decoder.block.2.layer.5.k",
            "blocks.0.w",
            "0.weight",
            "2",
            "conv1.weight",
            "h.x1.w",
            "h.1x.w",
            "h.-1.w",
            "h.²._",
        ]
    )
    expected = {
        "model.embed_tokens.weight": 0,
        "model.layers.0.self_attn.q_proj.weight": 0,
        "model.layers.3.mlp.experts.7.w1": Fraction(3, 4),
        "model.layers.4.norm.weight": 1,
        "model.norm.weight": 0,
        "lm_head.weight": 0,
        "decoder.block.1.layer.0.k": Fraction(1, 2),
        "decoder.block.2.layer.5.k": 1,
        "blocks.0.w": 1,  # the only layer of its stack
        "0.weight": 0,
        "2": 1,
        "conv1.weight": 0,
        "h.x1.w": 0,
        "h.1x.w": 0,
        "h.-1.w": 0,
        "h.²._": 0,
    }
    assert {name: depths.of(name) for name in expected} == expected


def test_depth_of_an_unknown_name():
    with pytest.raises(KeyError):
        Depths(["a.0.b"]).of("a.1.b")


def test_no_layers():
    assert Depths(["", "w" * 10, "9" * 5000]).of("9" * 5000) == 0
