"""f(x) = abx: where the mean of the parameters fails and the mean on the quotient does not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.errors import MethodError
from isthmus.geometry.scaling_toy import balanced, euclidean_mean, product, quotient_mean, rescale

numbers = st.floats(0.1, 10) | st.floats(-10, -0.1)


@given(points=st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5), data=st.data())
def test_quotient_mean_is_the_mean_of_products_in_every_gauge(points, data):
    weights = data.draw(st.lists(st.floats(0.1, 2), min_size=len(points), max_size=len(points)))
    gauges = data.draw(st.lists(numbers, min_size=len(points), max_size=len(points)))
    expected = np.average([a * b for a, b in points], weights=weights)
    for chosen in (points, rescale(points, gauges)):
        mean = quotient_mean(chosen, weights)
        assert product(mean) == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert abs(mean[0]) == pytest.approx(abs(mean[1]), rel=1e-15)


@given(a=numbers, b=numbers)
def test_the_mean_of_parameters_collapses_for_one_function_in_two_gauges(a, b):
    points = [(a, b), rescale((a, b), -1.0)]
    assert np.abs(euclidean_mean(points, [1, 1])).max() <= 1e-12
    assert product(quotient_mean(points, [1, 1])) == pytest.approx(a * b, rel=1e-12)


@given(a=numbers, b=numbers, c=st.floats(0.1, 10))
def test_the_mean_of_parameters_depends_on_the_gauge(a, b, c):
    """Its product is ab(2 + c + 1/c)/4, which is ab only for c = 1."""
    mean = euclidean_mean([(a, b), rescale((a, b), c)], [1, 1])
    assert product(mean) == pytest.approx(a * b * (2 + c + 1 / c) / 4, rel=1e-12)


def test_balanced_points():
    np.testing.assert_allclose(balanced([4.0, -9.0, 0.0]), [[2, 2], [3, -3], [0, 0]])


def test_zero_is_no_rescaling():
    with pytest.raises(MethodError, match="no rescaling"):
        rescale((1.0, 2.0), 0.0)
