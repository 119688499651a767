"""Heuristics as coefficients, against the merge methods themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isthmus.errors import MethodError
from isthmus.methods.task_vectors import DARE_LINEAR, TASK_ARITHMETIC, TIES
from isthmus.projection import heuristics
from isthmus.projection.task_vector_bases import RowGroups

from ..methods.streams import run
from .layers import layer


def merged(method, tau, **values):
    experts = tau.numpy()
    found = run(method, experts, np.zeros_like(experts[0]), **values)
    return torch.from_numpy(found)


@pytest.fixture
def tau():
    found = layer(m=8, n=7).tau
    found[0, :2] = 0
    found[1, 3] = found[2, 3]
    return found


@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_ties_is_the_method(tau, density):
    weights = (0.5, 1.0, 2.0)
    found = heuristics.ties(tau, density=density, weights=weights, scale=0.7)
    expected = merged(TIES, tau, density=density, weight=weights, **{"lambda": 0.7})
    torch.testing.assert_close(found.correction, expected)
    torch.testing.assert_close((found.coefficients * tau).sum(0), expected)
    assert float(found.coefficients.max()) <= 0.7


def test_dare_is_the_method(tau):
    seeds = (11, 12, 13)
    found = heuristics.dare(tau, seeds, density=0.3, weights=[0.5, 1.0, 2.0])
    expected = merged(
        DARE_LINEAR, tau, seeds=seeds, density=0.3, weight=(0.5, 1.0, 2.0), rescale_norm="density"
    )
    torch.testing.assert_close(found.correction, expected)


def test_task_arithmetic_and_soups_are_the_method(tau):
    weights = (0.5, 1.0, 2.0)
    expected = merged(TASK_ARITHMETIC, tau, weight=weights)
    torch.testing.assert_close(heuristics.task_arithmetic(tau, weights).correction, expected)
    torch.testing.assert_close(heuristics.soup(tau, weights).correction, expected / 3.5)
    torch.testing.assert_close(heuristics.soup(tau).correction, tau.mean(0))


def test_a_point_keeps_the_coefficients_of_the_heuristic(tau):
    weights = [0.2, 0.7, 0.4]
    found = RowGroups.scalar(tau).point(heuristics.task_arithmetic(tau, weights))
    np.testing.assert_allclose(found[0], weights, rtol=1e-12)
    # Identical experts: the coefficients are the heuristic's, not another answer.
    same = torch.stack([tau[0], tau[0]])
    found = RowGroups.scalar(same).point(heuristics.task_arithmetic(same, [0.9, 0.1]))
    np.testing.assert_allclose(found[0], [0.9, 0.1], rtol=1e-12)


def test_bad_input_is_refused(tau):
    with pytest.raises(MethodError, match="density"):
        heuristics.ties(tau, density=0)
    with pytest.raises(MethodError, match="density"):
        heuristics.dare(tau, [1, 2, 3], density=1.5)
    with pytest.raises(MethodError, match="2 seeds for 3"):
        heuristics.dare(tau, [1, 2])
    with pytest.raises(MethodError, match="sum to zero"):
        heuristics.soup(tau, [1, -1, 0])
    for weights in ((1, -1, 1), (0, 0, 0)):
        with pytest.raises(MethodError, match="negative, or all zero"):
            heuristics.ties(tau, weights=weights)
    with pytest.raises(MethodError, match="finite weight"):
        heuristics.task_arithmetic(tau, [1.0, float("nan"), 1.0])
