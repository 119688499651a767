"""Gradients of norms."""

from __future__ import annotations

import math

import pytest
import torch

from isthmus.errors import TrainingError
from isthmus.optim.gradient_maps import matrix_blocks, polar_factor, sign, unit, update_scale

MAPS = {
    "l1": (sign, lambda x: x.abs().sum(), lambda x: x.abs().max()),
    "frobenius": (unit, torch.linalg.vector_norm, torch.linalg.vector_norm),
    "nuclear": (
        polar_factor,
        lambda x: torch.linalg.matrix_norm(x, "nuc"),
        lambda x: torch.linalg.matrix_norm(x, 2),
    ),
}


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("norm", MAPS)
@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (5, 5)])
def test_gradient_attains_the_norm_with_dual_norm_one(norm, shape):
    gradient, primal, dual = MAPS[norm]
    x = normal(*shape)
    assert torch.isclose((gradient(x) * x).sum(), primal(x))
    assert torch.isclose(dual(gradient(x)), torch.tensor(1.0, dtype=torch.float64))
    assert torch.allclose(gradient(3 * x), gradient(x))


@pytest.mark.parametrize("norm", MAPS)
def test_gradient_agrees_with_autograd(norm):
    gradient, primal, _ = MAPS[norm]
    x = normal(4, 6).requires_grad_()
    (expected,) = torch.autograd.grad(primal(x), x)
    assert torch.allclose(gradient(x.detach()), expected)


@pytest.mark.parametrize("norm", MAPS)
def test_nothing_moves_where_the_gradient_is_zero(norm):
    assert torch.equal(MAPS[norm][0](torch.zeros(3, 5)), torch.zeros(3, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_polar_factor_of_low_rank_has_its_rank(dtype):
    x = (normal(20, 3) @ normal(3, 12, seed=1)).to(dtype)
    values = torch.linalg.svdvals(polar_factor(x))
    expected = torch.tensor([1.0] * 3 + [0.0] * 9, dtype=dtype)
    assert torch.allclose(values, expected, atol=1e-5)


@pytest.mark.parametrize("norm", [*MAPS, "newton_schulz"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_are_passed_on(norm, bad):
    x = normal(3, 4)
    x[1, 2] = bad
    gradient = polar_factor(x, "newton_schulz") if norm == "newton_schulz" else MAPS[norm][0](x)
    assert gradient.isnan().all()


@pytest.mark.parametrize("shape", [(16, 64), (64, 16)])
def test_newton_schulz_is_near_the_polar_factor(shape):
    x = normal(*shape)
    near = polar_factor(x, "newton_schulz", dtype=torch.float64)
    values = torch.linalg.svdvals(near)
    assert values.min() > 0.6
    assert values.max() < 1.25
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    # The iteration acts on singular values alone.
    assert torch.allclose(left.mT @ near @ right.mT, torch.diag(left.mT @ near @ right.mT).diag())


def test_update_scale():
    assert update_scale((8, 2), "original") == 2
    assert update_scale((2, 8), "original") == 1
    assert update_scale((2, 25), "match_rms") == 1
    assert update_scale((2, 25), "none") == 1
    # The root mean square of a full-rank polar factor is 1/√max(rows, columns).
    update = update_scale((6, 25), "match_rms") * polar_factor(normal(6, 25))
    assert torch.isclose(update.square().mean().sqrt(), torch.tensor(0.2, dtype=torch.float64))


def test_blocks_are_views_of_the_outputs():
    weight = torch.zeros(2, 6)
    for number, block in enumerate(matrix_blocks(weight, transposed=True, split=(1, 2, 3))):
        block.fill_(number)
    assert torch.equal(weight, torch.tensor([[0.0, 1, 1, 2, 2, 2]] * 2))


def test_a_vector_is_no_matrix():
    with pytest.raises(TrainingError, match=r"shape \[3\] is no matrix"):
        matrix_blocks(torch.zeros(3))


@pytest.mark.parametrize("split", [(2, 2), (6, 0), (7, -1)])
def test_a_split_that_does_not_add_up(split):
    with pytest.raises(TrainingError, match="6 outputs, which do not split"):
        matrix_blocks(torch.zeros(6, 2), split=split)
