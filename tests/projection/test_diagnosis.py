"""Diagnosis of one layer: J of every merge, and the order in which they must stand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import MethodError
from isthmus.projection import diagnosis
from isthmus.projection.diagnosis import (
    BASES,
    CONTAINS,
    HEURISTICS,
    SCALES,
    diagnose_layer,
    in_all,
    scaled,
)
from isthmus.projection.statistics import InputMoments, with_constant

from .layers import layer


def moments_of(x):
    found = InputMoments.empty(x.shape[1])
    found.add(x)
    return found


def diagnosed(tau, inputs, weights=None, **options):
    moments = [moments_of(x) for x in inputs]
    return diagnose_layer(tau, moments, weights, seeds=range(len(tau)), **options)


def test_values_are_those_of_the_outputs_themselves():
    one = layer()
    found = diagnosed(one.tau, one.inputs, [1.0] * 3)
    assert found.initial == pytest.approx(one.error(torch.zeros_like(one.base)))
    assert found.heuristics["soup"] == pytest.approx(one.error(one.tau.mean(dim=0)))
    assert found.heuristics["task arithmetic"] == pytest.approx(one.error(one.tau.sum(dim=0)))
    for scale in SCALES:
        assert found.scales[scale] == pytest.approx(one.error(scale * one.tau.sum(dim=0)))
    # One scalar for each expert, by least squares on the outputs.
    columns = torch.stack(
        [torch.cat([x @ tau.mT for x in one.inputs]).flatten() for tau in one.tau], dim=1
    )
    wanted = torch.cat([x @ tau.mT for x, tau in zip(one.inputs, one.tau, strict=True)]).flatten()
    left = torch.linalg.lstsq(columns, wanted).solution
    assert found.projections["scalar"] == pytest.approx(
        float((columns @ left - wanted).square().sum())
    )
    # All weights, by least squares on the inputs.
    x = torch.cat(one.inputs)
    y = wanted.reshape(len(x), -1)
    best = torch.linalg.lstsq(x, y).solution
    assert found.projections["optimal"] == pytest.approx(float((x @ best - y).square().sum()))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    experts=st.integers(1, 4),
    m=st.integers(1, 7),
    n=st.integers(1, 6),
    examples=st.integers(1, 12),
)
def test_a_basis_is_no_worse_than_what_it_contains(seed, experts, m, n, examples):
    one = layer(seed, experts, m, n, examples)
    found = diagnosed(one.tau, one.inputs)
    slack = 1e-7 * found.initial
    for basis in BASES:
        points = [found.value(name) for name in CONTAINS[basis]] + [*found.scales.values()]
        assert found.projections[basis] <= min(points) + slack
    ranks = [found.initial, *found.ranks.values(), found.projections["optimal"]]
    assert all(more <= less + slack for less, more in itertools.pairwise(ranks))
    assert all(found.bounds[rank] <= value + slack for rank, value in found.ranks.items())


def test_a_basis_that_is_worse_is_an_error():
    one = layer()
    found = diagnosed(one.tau, one.inputs)
    worse = {**found.projections, "scalar": found.initial}
    with pytest.raises(MethodError, match=r"basis scalar has J = .*more than soup.*\n.*bug"):
        diagnosis._check(replace(found, projections=worse))
    bounds = dict.fromkeys(found.bounds, found.initial)
    with pytest.raises(MethodError, match="less than their bound"):
        diagnosis._check(replace(found, bounds=bounds))


def test_every_task_counts_alike():
    one = layer(experts=2)
    doubled = [one.inputs[0].repeat(3, 1), one.inputs[1]]
    found, again = diagnosed(one.tau, one.inputs), diagnosed(one.tau, doubled)
    assert again.initial == pytest.approx(found.initial)
    assert again.projections == pytest.approx(found.projections)
    assert found.inputs == pytest.approx(40)  # twice 20
    assert again.inputs == pytest.approx(4 / (1 / 60 + 1 / 20))


def test_an_expert_that_equals_the_base_says_so_and_spoils_nothing():
    one = layer(experts=2)
    tau = torch.stack([one.tau[0], torch.zeros_like(one.tau[0])])
    found = diagnosed(tau, one.inputs)
    assert found.unchanged == (1,)
    assert not found.notes
    assert found.unknowns["diagonal"] == 1
    assert all(torch.isfinite(torch.tensor([*found.projections.values()])))


def test_when_all_equal_the_base_nothing_is_left():
    one = layer(experts=2)
    found = diagnosed(torch.zeros_like(one.tau), one.inputs)
    assert found.unchanged == (0, 1)
    assert found.initial == 0
    values = {*found.projections.values(), *found.heuristics.values(), *found.ranks.values()}
    assert values == {0.0}
    assert {found.captured(found.value(name)) for name in (*BASES, *HEURISTICS)} == {1.0}


@pytest.mark.parametrize("bias", [False, True])
def test_silent_inputs_are_told(bias):
    one = layer(experts=2)
    inputs = [torch.zeros_like(one.inputs[0]), one.inputs[1]]
    tau = one.tau
    if bias:
        inputs = [with_constant(x) for x in inputs]
        tau = torch.cat([tau, tau[:, :, :1]], dim=2)
    found = diagnosed(tau, inputs, bias=bias)
    assert found.silent == (0,)
    everything = diagnosed(one.tau, [torch.zeros_like(x) for x in one.inputs])
    assert everything.silent == (0, 1)
    assert {*everything.projections.values(), everything.initial} == {0.0}
    assert set(everything.ranks.values()) == {0.0}


def test_a_base_without_error_is_worse_merged():
    # Each expert changes only what its own inputs do not show.
    tau = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    inputs = [torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])]
    found = diagnosed(tau, inputs)
    assert found.initial == 0
    assert found.captured(found.heuristics["soup"]) == float("-inf")
    assert found.captured(found.projections["diagonal"]) == 1


def test_identical_experts_leave_coefficients_open():
    one = layer(experts=2)
    found = diagnosed(one.tau[:1].expand(2, -1, -1), one.inputs)
    assert "scalar: 2 of 2" in found.notes
    assert found.heuristics["soup"] <= 1e-12 * found.initial
    assert found.projections["scalar"] <= 1e-12 * found.initial


def test_what_is_expected_grows_with_the_unknowns():
    one = layer(experts=2, m=6, n=5, examples=10)
    found = diagnosed(one.tau, one.inputs)
    assert found.inputs == pytest.approx(20)
    factor = (20 + 5) / (20 - 5)
    assert found.expected("optimal") == pytest.approx(factor * found.projections["optimal"])
    assert found.expected("soup") == found.heuristics["soup"]
    few = diagnosed(one.tau, [x[:2] for x in one.inputs])
    assert few.expected("optimal") == float("inf")


def test_what_is_expected_is_near_what_new_inputs_leave():
    """Over many draws of calibration inputs, of the same layer."""
    draw = torch.Generator().manual_seed(0)
    m, n, count = 4, 12, 30
    tau = torch.randn(2, m, n, generator=draw, dtype=torch.float64)
    expected, met = 0.0, 0.0
    for _ in range(200):
        inputs = [torch.randn(count, n, generator=draw, dtype=torch.float64) for _ in tau]
        found = diagnosed(tau, inputs)
        x = torch.cat(inputs)
        y = torch.cat([one @ t.mT for one, t in zip(inputs, tau, strict=True)])
        best = torch.linalg.lstsq(x, y).solution.mT
        expected += found.expected("optimal")
        # White inputs, count for each task; weights as in the diagnosis.
        met += sum(float((best - t).square().sum()) for t in tau)
    assert expected == pytest.approx(met, rel=0.1)


def test_sums_are_over_layers_with_one_scale():
    parts = [diagnosed(one.tau, one.inputs) for one in (layer(0), layer(1, m=3, n=9))]
    total = in_all(parts)
    for name in HEURISTICS:
        assert total.heuristics[name] == sum(part.heuristics[name] for part in parts)
    assert total.scales[total.best_scale] == min(
        sum(part.scales[scale] for part in parts) for scale in SCALES
    )
    assert total.ranks[4] == parts[0].ranks[4] + parts[1].projections["optimal"]
    assert total.bounds[4] == parts[0].bounds[4]
    one = replace(
        parts[1], projections={k: v for k, v in parts[1].projections.items() if k != "columns"}
    )
    assert "columns" not in in_all([parts[0], one]).projections


def test_columns_are_left_out_where_they_are_too_many(monkeypatch):
    monkeypatch.setattr(diagnosis, "FORMED", 14)
    one = layer(experts=3, n=5)
    assert "columns" not in diagnosed(one.tau, one.inputs).projections


def test_the_best_heuristic_may_be_scaled():
    one = layer(experts=1)
    found = diagnosed(one.tau, one.inputs)
    assert found.best_heuristic[0] == "soup"  # of equal ones the first
    scales = {**found.scales, 0.3: -1.0}
    assert replace(found, scales=scales).best_heuristic == (scaled(0.3), -1.0)
    assert scaled(1.0) == "task arithmetic"


def test_moments_of_another_layer():
    one = layer()
    with pytest.raises(MethodError, match="inputs of size 4 for weights of 5 columns"):
        diagnosed(one.tau, [x[:, :4] for x in one.inputs])


def test_seeds_for_other_experts():
    one = layer()
    with pytest.raises(MethodError, match="2 seeds for 3 experts"):
        diagnose_layer(one.tau, one.moments, seeds=(1, 2))
