"""Optimal directions, reduced-rank regression and the sketch, against decompositions of the residuals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from isthmus.errors import MethodError
from isthmus.projection.directions import OutputDirections
from isthmus.projection.objective import LayerObjective
from isthmus.projection.optimal import expert_spectrum, reduced_rank, target_spectrum
from isthmus.projection.project import project
from isthmus.projection.sketch import FrequentDirections
from isthmus.projection.statistics import TargetMoments

from .layers import layer


def residuals(one):
    """b for every example, shape [N, m]."""
    return torch.cat([-x @ tau.mT for tau, x in zip(one.tau, one.inputs, strict=True)])


@pytest.mark.parametrize("m", [4, 40])
def test_the_spectrum_is_that_of_the_residuals(m):
    one = layer(m=m)
    found = expert_spectrum(one.tau, one.moments)
    _, roots, right = torch.linalg.svd(residuals(one), full_matrices=False)
    count = min(m, 15)
    np.testing.assert_allclose(
        found.values[:count], roots[:count].square(), rtol=1e-7, atol=1e-9 * found.total
    )
    assert found.total == pytest.approx(one.objective.initial)
    overlap = (found.leading(2).mT @ right[:2].mT).abs()
    torch.testing.assert_close(overlap, torch.eye(2).double(), atol=1e-6, rtol=0)
    energy = (residuals(one) @ found.leading(2)).square().sum() / found.total
    assert found.captured(2) == pytest.approx(float(energy))
    assert found.captured(0) == 0
    assert found.captured(m) == pytest.approx(1)


def test_the_spectrum_of_recorded_targets():
    one = layer()
    moments = TargetMoments.empty(6, 5, outer=True)
    for tau, x in zip(one.tau, one.inputs, strict=True):
        moments.add(x, x @ (one.base + tau).mT)
    expected = expert_spectrum(one.tau, one.moments)
    found = target_spectrum(moments, one.base)
    torch.testing.assert_close(found.values, expected.values, atol=1e-9 * found.total, rtol=1e-9)
    residual = TargetMoments.empty(6, 5, outer=True)
    for tau, x in zip(one.tau, one.inputs, strict=True):
        residual.add(x, x @ tau.mT)
    torch.testing.assert_close(target_spectrum(residual, None).values, expected.values)
    with pytest.raises(MethodError, match="not recorded"):
        target_spectrum(TargetMoments.empty(6, 5), one.base)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_no_weights_of_a_rank_are_better_than_reduced_rank_regression(rank):
    one = layer(seed=4)
    objective = one.objective
    found = reduced_rank(objective, rank)
    reached = one.error(found.correction)
    assert float(found.captured[-1]) == pytest.approx(1 - reached / objective.initial)
    assert int(torch.linalg.matrix_rank(found.correction)) == rank
    assert float(found.captured[-1]) <= expert_spectrum(one.tau, one.moments).captured(rank)

    def error(flat):
        left, right = np.split(flat, [6 * rank])
        delta = torch.from_numpy(left.reshape(6, rank) @ right.reshape(rank, 5))
        slope = 2 * (delta @ objective.gram + objective.cross).numpy()
        gradient = [slope @ right.reshape(rank, 5).T, left.reshape(6, rank).T @ slope]
        return objective.value(delta), np.concatenate([part.ravel() for part in gradient])

    lowest = math.inf
    for seed in range(6):
        start = np.random.default_rng(seed).normal(size=11 * rank)
        peer = minimize(error, start, jac=True, options={"maxiter": 3000, "gtol": 1e-9})
        lowest = min(lowest, peer.fun)
    assert reached <= lowest * (1 + 1e-9)
    assert reached == pytest.approx(lowest, rel=1e-4)


def test_given_the_directions_the_weights_are_regression():
    one = layer()
    found = reduced_rank(one.objective, 2)
    again = project(OutputDirections(found.directions, 5), one.objective)
    torch.testing.assert_close(again.correction, found.correction)
    # The directions that serve free coefficients best serve weights less well, but under the bound.
    spectrum = expert_spectrum(one.tau, one.moments)
    free = project(OutputDirections(spectrum.leading(2), 5), one.objective)
    assert free.captured <= again.captured <= spectrum.captured(2)


def test_with_white_inputs_it_is_the_truncated_decomposition():
    delta = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()
    white = LayerObjective(torch.eye(5).double(), -delta, delta.square().sum(1))
    left, values, right = torch.linalg.svd(delta, full_matrices=False)
    expected = (left[:, :3] * values[:3]) @ right[:3]
    torch.testing.assert_close(reduced_rank(white, 3).correction, expected)


def test_full_rank_is_regression_and_no_rank_is_beyond():
    one = layer()
    found = reduced_rank(one.objective, 9)
    torch.testing.assert_close(found.correction, one.objective.regression())
    assert len(found.captured) == 6
    assert bool((found.captured.diff() >= 0).all())


@pytest.mark.parametrize("rows", [3, 8, 30])
def test_the_sketch_keeps_its_promise(rows):
    generator = torch.Generator().manual_seed(0)
    b = torch.randn(400, 20, generator=generator, dtype=torch.float64) * torch.logspace(0, -2, 20)
    sketch = FrequentDirections(20, rows)
    for chunk in b.split(37):
        sketch.add(chunk.reshape(1, -1, 20))
    exact = b.mT @ b
    assert sketch.total == pytest.approx(float(exact.trace()))
    found = sketch.spectrum()
    held = (found.directions * found.values) @ found.directions.mT
    gaps = torch.linalg.eigvalsh(exact - held)
    assert float(gaps[0]) >= -1e-9 * sketch.total
    assert float(gaps[-1]) <= sketch.shrinkage + 1e-9 * sketch.total
    # The authors' bound: δ ≤ ‖B − B_k‖²/(ℓ − k).
    values = torch.linalg.eigvalsh(exact).flip(0)
    for k in range(rows):
        assert sketch.shrinkage <= float(values[k:].sum()) / (rows - k) + 1e-9 * sketch.total
    for rank in (1, 2, 3):
        low, high = sketch.bounds(rank)
        best = float(values[:rank].sum()) / sketch.total
        own = (b @ found.leading(rank)).square().sum() / sketch.total
        assert low - 1e-12 <= float(own) <= best + 1e-12
        assert best <= high + 1e-12
    if rows >= 20:
        assert sketch.shrinkage == 0


def test_no_error_at_all():
    one = layer()
    one.tau = one.tau * 0
    assert expert_spectrum(one.tau, one.moments).captured(1) == 1
    assert reduced_rank(one.objective, 2).captured.tolist() == [1, 1, 1]
    sketch = FrequentDirections(4, 2)
    sketch.add(torch.zeros(9, 4))
    assert sketch.bounds(1) == (1, 1)


def test_bad_input_is_refused():
    one = layer()
    with pytest.raises(MethodError, match="rank"):
        reduced_rank(one.objective, 0)
    spectrum = expert_spectrum(one.tau, one.moments)
    with pytest.raises(MethodError, match="7 of 6"):
        spectrum.leading(7)
    with pytest.raises(MethodError, match="rank"):
        spectrum.captured(-1)
    with pytest.raises(MethodError, match="3 targets"):
        expert_spectrum(one.tau, one.moments[:1])
    with pytest.raises(MethodError, match="sketch"):
        FrequentDirections(3, 0)
    with pytest.raises(MethodError, match="expected"):
        FrequentDirections(3, 2).add(torch.zeros(2, 4))
    with pytest.raises(MethodError, match="NaN"):
        FrequentDirections(3, 2).add(torch.full((2, 3), math.inf))
