"""Curves through gains: against a regression written otherwise, and on data whose answer is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import IsthmusError
from isthmus.lab.noise.curve import BANDWIDTHS, optimum, smooth_curve


def regression(place, x, y, bandwidth, left_out=None):
    """Nadaraya and Watson's mean, one term at a time."""
    top = bottom = 0.0
    for number, (a, b) in enumerate(zip(x, y, strict=True)):
        if number != left_out:
            weight = math.exp(-0.5 * ((math.log(place) - math.log(a)) / bandwidth) ** 2)
            top, bottom = top + weight * b, bottom + weight
    return top / bottom


@given(st.integers(0, 10_000))
def test_against_sums_term_by_term(seed):
    generator = np.random.default_rng(seed)
    x, y = np.exp(generator.uniform(-1, 1, 12)), generator.normal(size=12)
    curve = smooth_curve(x, y)
    errors = {
        h: math.sqrt(
            np.mean([(regression(x[i], x, y, h, left_out=i) - y[i]) ** 2 for i in range(12)])
        )
        for h in BANDWIDTHS
    }
    assert curve.spread == pytest.approx(min(errors.values()), rel=1e-9)
    assert errors[curve.bandwidth] == pytest.approx(curve.spread)
    places = np.exp(np.linspace(-1, 1, 5))
    expected = [regression(place, x, y, curve.bandwidth) for place in places]
    np.testing.assert_allclose(curve.at(places), expected, rtol=1e-9)


def test_the_unit_of_the_knob_does_not_matter():
    generator = np.random.default_rng(0)
    x, y = np.exp(generator.uniform(-3, 3, 20)), generator.normal(size=20)
    one, other = smooth_curve(x, y), smooth_curve(1000 * x, y)
    assert one.spread == pytest.approx(other.spread)
    np.testing.assert_allclose(one.at(x), other.at(1000 * x))


def test_far_from_all_points_the_nearest_counts():
    curve = smooth_curve(np.array([1.0, 2, 3, 4]), np.array([5.0, 6, 7, 8]))
    assert curve.at(np.array([1e-300, 1e300])) == pytest.approx([5, 8])


def test_gains_that_one_knob_decides_collapse_on_it_alone():
    generator = np.random.default_rng(0)
    rate, batch = (10 ** generator.uniform(-2, 0, 60) for _ in range(2))
    gains = np.tanh(2 * np.log(rate / batch)) + 0.02 * generator.normal(size=60)
    spreads = [smooth_curve(knob, gains).spread for knob in (rate / batch, rate, batch)]
    assert spreads[0] < 0.25 * min(spreads[1:])


def test_the_top_of_a_parabola():
    generator = np.random.default_rng(1)
    x = np.geomspace(1e-4, 1e-1, 40)
    y = -(np.log10(x / 2e-3) ** 2) + 0.1 * generator.normal(size=40)
    found = optimum(smooth_curve(x, y))
    assert found.interval[0] < 2e-3 < found.interval[1]
    assert found.at == pytest.approx(2e-3, rel=0.6)
    assert found.interior == 1
    assert found.rise > 0.5
    assert found.fall > 1


def test_gains_that_only_rise_have_no_interior_optimum():
    x = np.geomspace(1e-4, 1e-1, 40)
    found = optimum(smooth_curve(x, np.log(x)))
    assert found.interior < 0.05
    assert found.at == pytest.approx(1e-1)
    assert found.fall == 0


def test_the_bootstrap_is_the_same_every_time():
    generator = np.random.default_rng(2)
    curve = smooth_curve(np.geomspace(1, 10, 15), generator.normal(size=15))
    assert optimum(curve) == optimum(curve)


@pytest.mark.parametrize(
    ("x", "y", "words"),
    [
        ([1, 2, 3], [1, 2, 3], "3 knobs"),
        ([1, 2, 3, 4], [1, 2, 3], "4 knobs and 3 gains"),
        ([0, 1, 2, 3], [1, 2, 3, 4], "not above 0"),
        ([1, 2, 3, 4], [1, 2, 3, math.nan], "not finite"),
    ],
)
def test_what_no_curve_goes_through(x, y, words):
    with pytest.raises(IsthmusError, match=words):
        smooth_curve(np.array(x, float), np.array(y, float))
