"""The compiled loops give the bits of their forms in the array API."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from isthmus.methods.consensus import merge_agreeing, merge_agreeing_by_array
from isthmus.methods.kernels import BLOCK
from isthmus.methods.method import WeightedSum
from isthmus.methods.sparsify import trim, trim_by_array
from isthmus.methods.weighted import weighted_sum, weighted_sum_of_bfloat16

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


codes = arrays(
    np.uint16,
    st.tuples(st.integers(1, 4), st.integers(1, 30)),
    elements=st.integers(0, 0xFFFF) | st.sampled_from([0, 0x8000, 0x7F7F, 0x3F80, 1]),
)


@given(codes, st.data())
@settings(max_examples=300, deadline=None)
def test_weighted_sums_of_bfloat16_bits(stack, data):
    weight = st.sampled_from([1.0, 0.3, -0.7, 0.0, 2.0**-100])
    weighted = WeightedSum(
        tuple(data.draw(weight) for _ in stack), data.draw(st.sampled_from([1.0, 3.0, -0.4]))
    )
    with np.errstate(all="ignore"):
        total = weighted_sum(stack.view(ml_dtypes.bfloat16).astype(np.float32), weighted.weights)
        total /= np.float32(weighted.divisor)
        expected = total.astype(ml_dtypes.bfloat16)
    merged = np.empty(stack.shape[1], np.uint16)
    finite = weighted_sum_of_bfloat16(stack, weighted, merged)
    assert finite == bool((abs(total) <= ml_dtypes.finfo(ml_dtypes.bfloat16).max).all())
    if finite:
        assert merged.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_blocks_of_bits_meet_without_a_seam(size):
    numbers = np.random.default_rng(size).standard_normal((3, size)).astype(ml_dtypes.bfloat16)
    expected = weighted_sum(numbers.astype(np.float32), [1.0, 0.5, 0.25]) / np.float32(1.75)
    merged = np.empty(size, np.uint16)
    weighted = WeightedSum((1.0, 0.5, 0.25), 1.75)
    assert weighted_sum_of_bfloat16(numbers.view(np.uint16), weighted, merged)
    assert merged.tobytes() == expected.astype(ml_dtypes.bfloat16).tobytes()
