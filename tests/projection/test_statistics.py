"""Objectives from streamed moments, against the outputs that they stand for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from isthmus.errors import MethodError
from isthmus.projection.objective import expert_objective, target_objective
from isthmus.projection.statistics import InputMoments, TargetMoments, with_constant

from .layers import layer


def close(left, right):
    np.testing.assert_allclose(left, right, rtol=1e-10)


def test_the_objective_is_the_error_of_the_outputs():
    one = layer()
    for correction in (torch.zeros(6, 5), one.tau[0], torch.randn(6, 5, dtype=torch.float64)):
        close(one.objective.value(correction), one.error(correction.double()))
    close(one.objective.initial, one.error(torch.zeros(6, 5)))


def test_chunks_shapes_and_types_change_nothing():
    x = torch.randn(4, 6, 5).to(torch.bfloat16)
    whole, parts = InputMoments.empty(5), InputMoments.empty(5)
    whole.add(x)
    for part in x.reshape(-1, 5).split(7):
        parts.add(part)
    rows = x.reshape(-1, 5).double()
    torch.testing.assert_close(whole.gram, rows.mT @ rows, rtol=1e-13, atol=0)
    torch.testing.assert_close(whole.gram, parts.gram, rtol=1e-13, atol=0)
    assert whole.count == parts.count == 24


@pytest.mark.parametrize("n", [1, 300, 1024, 1300])
def test_both_triangles_are_there_whenever_they_are_read(n):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(40, n, generator=random, dtype=torch.float64)
    moments = InputMoments.empty(n)
    for start, stop in ((0, 0), (0, 10), (10, 25), (25, 40)):
        moments.add(x[start:stop].mT.contiguous().mT)
        expected = x[:stop].numpy().T @ x[:stop].numpy()
        np.testing.assert_allclose(moments.gram, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(moments.gram, moments.gram.mT)


def test_a_part_of_a_larger_matrix_can_be_added_to():
    x, whole = torch.randn(6, 4, dtype=torch.float64), torch.zeros(5, 5, dtype=torch.float64)
    InputMoments(whole).without_constant().add(x)
    torch.testing.assert_close(whole[:4, :4], x.mT @ x)
    assert not whole[4].any()


def test_weights_are_repetitions_and_zero_is_padding():
    x, y = torch.randn(3, 5).double(), torch.randn(3, 6).double()
    weights = torch.tensor([2.0, 0.0, 1.0])
    repeated = [0, 0, 2]
    weighted, plain = TargetMoments.empty(6, 5), TargetMoments.empty(6, 5)
    weighted.add(x, y, weights)
    plain.add(x[repeated], y[repeated])
    for name in ("gram", "cross", "squares"):
        torch.testing.assert_close(getattr(weighted, name), getattr(plain, name))
    assert weighted.count == 2
    only = InputMoments.empty(5)
    only.add(x, weights)
    torch.testing.assert_close(only.gram, plain.gram)
    assert only.count == 2


def test_a_task_weight_scales_its_inputs():
    one = layer()
    weighted = expert_objective(one.tau, one.moments, [1.0, 4.0, 0.0])
    one.inputs[1] = 2 * one.inputs[1]
    one.inputs[2] = 0 * one.inputs[2]
    delta = one.base
    close(weighted.value(delta), one.error(delta))


@pytest.mark.parametrize("outer", [False, True])
def test_targets_at_inputs_of_their_own(outer):
    random = torch.Generator().manual_seed(1)
    w, delta = torch.randn(2, 6, 5, generator=random, dtype=torch.float64)
    x = torch.randn(30, 5, generator=random, dtype=torch.float64)
    y = x @ w.mT + torch.randn(30, 6, generator=random, dtype=torch.float64)
    absolute = TargetMoments.empty(6, 5, outer=outer)
    residual = TargetMoments.empty(6, 5, outer=outer)
    for rows in (slice(0, 11), slice(11, 30)):
        absolute.add(x[rows], y[rows])
        residual.add(x[rows], y[rows] - x[rows] @ w.mT)
    expected = float((x @ (w + delta).mT - y).square().sum())
    close(target_objective(absolute, w).value(delta), expected)
    close(target_objective(residual, None).value(delta), expected)


def test_recorded_targets_of_experts_are_the_expert_objective():
    one = layer()
    moments = TargetMoments.empty(6, 5)
    for target, x in zip(one.tau, one.inputs, strict=True):
        moments.add(x, x @ (one.base + target).mT)
    found = target_objective(moments, one.base)
    for name in ("gram", "cross", "squares"):
        torch.testing.assert_close(getattr(found, name), getattr(one.objective, name))


def test_a_bias_is_the_weight_of_a_constant():
    x, w, bias = torch.randn(9, 4).double(), torch.randn(3, 4).double(), torch.randn(3).double()
    moments = InputMoments.empty(5)
    moments.add(with_constant(x))
    target = torch.cat([w, bias.unsqueeze(1)], dim=1)
    found = expert_objective(target.unsqueeze(0), [moments])
    close(found.initial, float((x @ w.mT + bias).square().sum()))


def test_without_the_constant_the_inputs_themselves_remain():
    x = torch.randn(9, 4)
    plain, longer = InputMoments.empty(4), InputMoments.empty(5)
    plain.add(x)
    longer.add(with_constant(x))
    found = longer.without_constant()
    torch.testing.assert_close(found.gram, plain.gram)
    assert found.count == 9
    torch.testing.assert_close(longer.gram[-1], with_constant(x).double().sum(dim=0))


def test_bad_input_is_refused():
    one = layer()
    moments = InputMoments.empty(5)
    with pytest.raises(MethodError, match="expected"):
        moments.add(torch.randn(3, 4))
    with pytest.raises(MethodError, match="NaN"):
        moments.add(torch.full((3, 5), math.nan))
    with pytest.raises(MethodError, match="weights"):
        moments.add(torch.randn(3, 5), torch.tensor([1.0, -1.0, 1.0]))
    with pytest.raises(MethodError, match="no calibration inputs"):
        expert_objective(one.tau, [moments] * 3)
    with pytest.raises(MethodError, match="no calibration inputs"):
        target_objective(TargetMoments.empty(6, 5), one.base)
    with pytest.raises(MethodError, match="3 targets and inputs of 2"):
        expert_objective(one.tau, one.moments[:2])
    with pytest.raises(MethodError, match="weights"):
        expert_objective(one.tau, one.moments, [1, 1, -1])
    with pytest.raises(MethodError, match="inputs of size 4"):
        expert_objective(one.tau, [InputMoments.empty(4)] * 3)
    with pytest.raises(MethodError, match="3 inputs and 2 targets"):
        TargetMoments.empty(6, 5).add(torch.randn(3, 5), torch.randn(2, 6))
    with pytest.raises(MethodError, match="correction of shape"):
        one.objective.value(torch.zeros(5, 6))
    with pytest.raises(MethodError, match=r"expected \[K, m, n\]"):
        expert_objective(one.tau[0], one.moments)
