"""Fisher merging, against the dense system that it stands for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from isthmus.errors import MethodError
from isthmus.geometry.fisher import diagonal_fisher_mean, kronecker_fisher_mean

RANDOM = np.random.default_rng(0)


def positive(n, rank=None):
    half = RANDOM.normal(size=(n, rank or n))
    return torch.from_numpy(half @ half.T / n)


def normal(*shape):
    return torch.from_numpy(RANDOM.normal(size=shape))


def test_diagonal_against_least_squares():
    theta, fisher = normal(3, 4, 5), normal(3, 4, 5).square()
    weights = torch.tensor([1.0, 2.0, 3.0]).double()
    ours = diagonal_fisher_mean(list(theta), list(fisher), weights)
    scaled = weights.reshape(3, 1, 1) * fisher
    torch.testing.assert_close(ours, (scaled * theta).sum(0) / scaled.sum(0))


def test_equal_information_is_the_weighted_mean_and_no_information_too():
    theta = normal(3, 6)
    plain = torch.tensordot(torch.tensor([0.2, 0.3, 0.5]).double(), theta, dims=1)
    for level in (1.0, 0.0, 1e-300):
        fisher = torch.full((6,), level, dtype=torch.float64)
        ours = diagonal_fisher_mean(list(theta), [fisher] * 3, [0.2, 0.3, 0.5])
        torch.testing.assert_close(ours, plain)


def test_only_the_informed_model_decides():
    theta = [torch.tensor([1.0, 1.0]), torch.tensor([5.0, 5.0])]
    fisher = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])]
    torch.testing.assert_close(
        diagonal_fisher_mean(theta, fisher), torch.tensor([1.0, 3.0]).double()
    )


@pytest.mark.parametrize("rank", [None, 2])
def test_kronecker_against_the_dense_system(rank):
    m, n, damping, weights = 4, 5, 1e-2, np.array([0.2, 0.3, 0.5])
    theta = [normal(m, n) for _ in range(3)]
    g, a = [positive(m, rank) for _ in range(3)], [positive(n, rank) for _ in range(3)]
    ours = kronecker_fisher_mean(theta, g, a, weights, damping=damping)
    left, right = np.zeros((m * n, m * n)), np.zeros(m * n)
    for w, t, gk, ak in zip(weights, theta, g, a, strict=True):
        f = np.kron(gk.numpy(), ak.numpy())
        f += damping * np.trace(f) / (m * n) * np.eye(m * n)
        left, right = left + w * f, right + w * f @ t.numpy().ravel()
    np.testing.assert_allclose(ours.numpy().ravel(), np.linalg.solve(left, right), atol=1e-7)


def test_kronecker_returns_one_model_and_equal_models():
    w = normal(3, 4)
    for count in (1, 3):
        ours = kronecker_fisher_mean(
            [w] * count, [positive(3) for _ in range(count)], [positive(4) for _ in range(count)]
        )
        torch.testing.assert_close(ours, w)
    zero = torch.zeros(3, 3), torch.zeros(4, 4)
    ours = kronecker_fisher_mean([w, -w], [zero[0]] * 2, [zero[1]] * 2, [3, 1])
    torch.testing.assert_close(ours, w / 2)


def test_bad_input_is_refused():
    w, ones = normal(3, 4), torch.ones(3, 4)
    with pytest.raises(MethodError, match="negative diagonal"):
        diagonal_fisher_mean([w], [-ones])
    with pytest.raises(MethodError, match="NaN"):
        diagonal_fisher_mean([w], [ones * math.nan])
    with pytest.raises(MethodError, match="1 models and 2"):
        diagonal_fisher_mean([w], [ones, ones])
    with pytest.raises(MethodError, match="shape"):
        diagonal_fisher_mean([w, w[:2]], [ones, ones])
    with pytest.raises(MethodError, match="no points"):
        diagonal_fisher_mean([], [])
    with pytest.raises(MethodError, match="not positive semidefinite"):
        kronecker_fisher_mean([w], [-positive(3)], [positive(4)])
    with pytest.raises(MethodError, match="damping"):
        kronecker_fisher_mean([w], [positive(3)], [positive(4)], damping=0.0)
