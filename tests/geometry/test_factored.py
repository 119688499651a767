"""Low-rank products and their joint bases against dense float64 algebra."""

from __future__ import annotations

import pytest
import torch

from isthmus.errors import MethodError
from isthmus.geometry.factored import Factored, compressed, joint, left_basis, stacked

M, N = 23, 17


@pytest.fixture
def draw():
    return torch.Generator().manual_seed(3)


def product(draw, rank: int, m: int = M, n: int = N) -> Factored:
    return Factored(
        torch.randn(m, rank, generator=draw, dtype=torch.float64),
        torch.randn(rank, n, generator=draw, dtype=torch.float64),
    )


def regauged(update: Factored, draw, condition: float = 1e6) -> Factored:
    """(BQ, Q⁻¹A), Q of a given condition."""
    rank = update.rank
    u, _, v = torch.linalg.svd(torch.randn(rank, rank, generator=draw, dtype=torch.float64))
    scales = torch.logspace(0, -torch.tensor(condition).log10(), rank, dtype=torch.float64)
    return Factored(update.left @ (u * scales) @ v, v.mT @ (u / scales).mT @ update.right)


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def best(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


@pytest.mark.parametrize("rank", [1, 3, 6, 9, 40])
def test_recompression_is_the_truncated_decomposition(draw, rank):
    update = product(draw, 6)
    found, kept = update.recompressed(rank)
    dense = update.matrix()
    assert found.left.shape == (M, rank)
    assert found.right.shape == (rank, N)
    assert error(found.matrix(), best(dense, rank)) < 1e-12
    assert kept == pytest.approx(float(best(dense, rank).norm() / dense.norm()) ** 2, abs=1e-12)
    torch.testing.assert_close(found.left.mT @ found.left, found.right @ found.right.mT)


def test_more_columns_than_the_matrix_has_rows(draw):
    update = product(draw, 30)
    found, kept = update.recompressed(30)
    assert error(found.matrix(), update.matrix()) < 1e-12
    assert kept == 1
    assert not found.left[:, N:].any()


def test_what_a_matrix_lacks_in_rank_is_padded_with_exact_zeros(draw):
    twice = stacked([product(draw, 2)] * 2, [1.0, 1.0])
    found, kept = twice.recompressed(4)
    assert kept == 1
    assert not found.left[:, 2:].any()
    assert not found.right[2:].any()


@pytest.mark.parametrize(
    "zero", [Factored.zero(M, N), Factored(torch.zeros(M, 3), torch.ones(3, N))]
)
def test_the_zero_matrix(zero):
    found, kept = zero.recompressed(2)
    assert kept == 1
    assert found.left.shape == (M, 2)
    assert not found.matrix().any()
    assert joint([zero, zero]).cores.shape == (2, 0, 0)


def test_rank_zero_is_refused(draw):
    with pytest.raises(MethodError, match="rank 0"):
        product(draw, 2).recompressed(0)


def test_stacking_adds_up(draw):
    updates = [product(draw, r) for r in (2, 0, 5)]
    weights = [-0.3, 2.0, 0.7]
    total = stacked(updates, weights)
    assert total.rank == 7
    expected = sum(w * u.matrix() for w, u in zip(weights, updates, strict=True))
    assert error(total.matrix(), expected) < 1e-14
    assert error(updates[0].scaled(-3).matrix(), -3 * updates[0].matrix()) < 1e-15


def test_joint_coordinates_are_exact_and_the_bases_singular_vectors(draw):
    updates = [product(draw, r) for r in (2, 5, 3)] + [Factored.zero(M, N)]
    left, right, cores = joint(updates)
    assert cores.shape == (4, 10, 10)
    dense = [update.matrix() for update in updates]
    for core, matrix in zip(cores, dense, strict=True):
        torch.testing.assert_close(left @ core @ right.mT, matrix, atol=1e-12, rtol=0)
    for basis, stack in [(left, torch.cat(dense, 1)), (right, torch.cat(dense).mT)]:
        u = torch.linalg.svd(stack, full_matrices=False).U[:, :10]
        torch.testing.assert_close((u.mT @ basis).abs(), torch.eye(10).double(), atol=1e-9, rtol=0)


def test_the_basis_depends_on_the_updates_and_not_on_their_factors(draw):
    updates = [product(draw, r) for r in (2, 5, 3)]
    other = [regauged(update, draw) for update in updates]
    assert error(other[1].left, updates[1].left) > 0.1
    for one, two in zip(joint(updates), joint(other), strict=True):
        assert error(two, one) < 1e-7
    assert error(left_basis(updates[::-1]), left_basis(updates)) < 1e-9


def test_directions_that_updates_share_are_counted_once(draw):
    update = product(draw, 4)
    both = joint([update, regauged(update, draw, 1e4).scaled(-2)])
    assert both.cores.shape == (2, 4, 4)
    assert error(both.cores[1], -2 * both.cores[0]) < 1e-9
    deficient = Factored(update.left @ torch.ones(4, 4).double(), update.right)
    assert joint([deficient]).cores.shape == (1, 1, 1)


def test_more_directions_than_the_matrix_has(draw):
    updates = [product(draw, 12) for _ in range(3)]
    left, right, cores = joint(updates)
    assert cores.shape == (3, M, N)
    assert error(left @ cores[2] @ right.mT, updates[2].matrix()) < 1e-13


def test_ties_at_the_cut_go_to_the_guide(draw):
    """A flat spectrum has many best approximations; that along the guide does not hang on a basis."""
    left, right = (
        torch.linalg.qr(torch.randn(k, 6, generator=draw, dtype=torch.float64)).Q for k in (M, N)
    )
    lengths = torch.arange(6, 0, -1).double()
    expected = left[:, :2] @ right[:, :2].mT
    for _ in range(3):
        turn = torch.linalg.qr(torch.randn(6, 6, generator=draw, dtype=torch.float64)).Q
        # The same matrices, identity and diagonal, in other coordinates.
        found, kept = compressed(
            left @ turn, turn.mT @ turn, right @ turn, 2, guide=(turn.mT * lengths) @ turn
        )
        assert kept == pytest.approx(1 / 3)
        assert error(found.matrix(), expected) < 1e-12


def test_the_exponent_bounds_products_that_overflow_or_vanish():
    ones = Factored(torch.ones(4, 2), torch.ones(2, 3)).double()
    assert ones.exponent == 0
    for power in (600, -600):
        strong = Factored(*(factor * 2.0**power for factor in ones))
        assert strong.exponent == 2 * power
    assert Factored(torch.zeros(4, 2), torch.ones(2, 3)).exponent == -torch.inf
    assert Factored.zero(4, 3).exponent == -torch.inf
