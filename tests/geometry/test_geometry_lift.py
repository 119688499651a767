"""Matrices of several ranks as points of one rank."""

from __future__ import annotations

import pytest
import torch

from isthmus.errors import MethodError
from isthmus.geometry.lift import FLOOR, lifted


def matrices(ranks, m=9, n=8, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return torch.stack([normal(m, r) @ normal(r, n) for r in ranks])


def of(points, k):
    return points.u[k] @ points.b[k] @ points.v[k].mT


WEIGHTS = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def test_equal_ranks_stay_as_they_are():
    cores = matrices([3, 3, 3])
    points, cut, raised = lifted(cores, WEIGHTS, 3)
    torch.testing.assert_close(points.u @ points.b @ points.v.mT, cores, rtol=0, atol=1e-12)
    assert not cut.any()
    assert not raised.any()


def test_higher_ranks_are_cut_to_the_best_approximation():
    cores = matrices([4, 2, 2])
    points, cut, raised = lifted(cores, WEIGHTS, 2)
    u, s, vh = torch.linalg.svd(cores[0])
    torch.testing.assert_close(of(points, 0), (u[:, :2] * s[:2]) @ vh[:2], rtol=0, atol=1e-12)
    assert cut.tolist() == [True, False, False]
    assert not raised.any()


def test_lower_ranks_gain_what_the_others_have_elsewhere():
    cores = matrices([1, 3, 3])
    points, cut, raised = lifted(cores, WEIGHTS, 3)
    assert raised.tolist() == [True, False, False]
    assert not cut.any()
    eye = torch.eye(3, dtype=torch.float64)
    for frames in (points.u, points.v):
        torch.testing.assert_close(frames.mT @ frames, eye.expand(3, 3, 3), rtol=0, atol=1e-12)
    added = of(points, 0) - cores[0]
    strength = float(torch.linalg.svdvals(cores[0])[0])
    expected = torch.tensor([FLOOR * strength] * 2, dtype=torch.float64)
    torch.testing.assert_close(torch.linalg.svdvals(added)[:2], expected)
    assert float((cores[0].mT @ added).norm() + (cores[0] @ added.mT).norm()) < 1e-10
    # The directions point as the weighted sum does.
    total = torch.tensordot(WEIGHTS, cores, dims=1)
    assert (torch.diagonal(points.u[0].mT @ total @ points.v[0])[1:] > 0).all()


def test_the_rank_is_what_the_others_can_raise_every_matrix_to():
    cores = matrices([1, 1, 1])
    assert lifted(cores, WEIGHTS, 8).points.b.shape == (3, 3, 3)
    one = torch.stack([cores[0], 2 * cores[0], 3 * cores[0]])
    assert lifted(one, WEIGHTS, 8).points.b.shape == (3, 1, 1)
    assert lifted(matrices([5, 5], m=6, n=5)[:2], WEIGHTS[:2], 9).points.b.shape == (2, 5, 5)


def test_directions_at_the_size_of_rounding_are_absent():
    cores = matrices([2, 2, 2])
    spoiled = cores + 1e-9 * matrices([8, 8, 8], seed=1)
    plain, noisy = lifted(cores, WEIGHTS, 2), lifted(spoiled, WEIGHTS, 2)
    assert not noisy.cut.any()
    torch.testing.assert_close(of(noisy.points, 1), of(plain.points, 1), rtol=0, atol=1e-7)


def test_points_follow_turned_matrices():
    """Orthogonal changes of both bases, and another order, change the points alike."""
    generator = torch.Generator().manual_seed(3)
    cores = matrices([1, 2, 4])
    left = torch.linalg.qr(torch.randn(9, 9, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64)).Q
    order = [2, 0, 1]
    plain = lifted(cores, WEIGHTS, 4).points
    moved = lifted((left @ cores @ right)[order], WEIGHTS[order], 4).points
    for place, k in enumerate(order):
        torch.testing.assert_close(
            of(moved, place), left @ of(plain, k) @ right, rtol=0, atol=1e-10
        )


def test_what_cannot_be_raised_is_refused():
    cores = matrices([2, 2, 2])
    with pytest.raises(MethodError, match="rank 0"):
        lifted(cores, WEIGHTS, 0)
    cores[1] = 0
    with pytest.raises(MethodError, match="zero matrix") as refusal:
        lifted(cores, WEIGHTS, 2)
    assert "Leave it out" in refusal.value.cure
