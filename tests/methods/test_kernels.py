"""The compiled loops give the bits of their forms in the array API."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from isthmus.methods.consensus import merge_agreeing, merge_agreeing_by_array
from isthmus.methods.kernels import BLOCK
from isthmus.methods.sparsify import trim, trim_by_array

# Zeros of both signs, equal numbers and numbers that cancel come up often.
number = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 1e-30]) | st.floats(-8, 8, width=32)
rows = arrays(
    st.sampled_from([np.float32, np.float64]),
    st.tuples(st.integers(1, 4), st.integers(1, 30)),
    elements=number,
)


@given(rows, st.data())
@settings(max_examples=200, deadline=None)
def test_merging_what_agrees(stack, data):
    weights = [data.draw(st.sampled_from([1.0, 0.3, -0.7])) for _ in stack]
    mean = data.draw(st.booleans())
    expected = merge_agreeing_by_array(stack.copy(), weights, mean=mean)
    assert merge_agreeing(stack.copy(), weights, mean=mean).tobytes() == expected.tobytes()


@given(rows, st.data())
@settings(max_examples=100, deadline=None)
def test_trimming(stack, data):
    thresholds = [data.draw(st.sampled_from([0.0, 0.5, 1.0, 9.0])) for _ in stack]
    ours, theirs = stack.copy(), stack.copy()
    trim(ours, thresholds)
    trim_by_array(theirs, thresholds)
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_blocks_meet_without_a_seam(size):
    stack = np.random.default_rng(size).standard_normal((3, size)).astype(np.float32)
    expected = merge_agreeing_by_array(stack.copy(), [1.0, 0.5, 0.25], mean=True)
    found = merge_agreeing(stack.copy(), [1.0, 0.5, 0.25], mean=True)
    assert found.tobytes() == expected.tobytes()


def test_not_finite_numbers_that_were_allowed_stay_what_they_are():
    stack = np.array([[np.nan, np.inf, 1.0], [1.0, -np.inf, np.inf]], np.float32)
    with np.errstate(invalid="ignore"):
        expected = merge_agreeing_by_array(stack.copy(), [1.0, 1.0], mean=False)
    found = merge_agreeing(stack.copy(), [1.0, 1.0], mean=False)
    np.testing.assert_array_equal(found, expected)
