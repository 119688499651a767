"""Truncation against LAPACK's singular value decomposition."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.geometry import truncation
from isthmus.geometry.truncation import truncate, truncate_to_energy


def spectrum(shape: tuple[int, int], decay: float, seed: int = 0) -> np.ndarray:
    """A matrix whose singular values fall by exp(-decay) each; random without decay."""
    matrix = np.random.default_rng(seed).standard_normal(shape)
    if not decay:
        return matrix
    u, s, v = np.linalg.svd(matrix, full_matrices=False)
    return (u * np.exp(-decay * np.arange(s.size))) @ v


def shares(matrix: np.ndarray) -> np.ndarray:
    """The share of energy that each rank keeps at best."""
    energies = np.linalg.svd(matrix, compute_uv=False) ** 2
    return np.cumsum(energies) / energies.sum()


MATRICES = [
    spectrum(shape, decay)
    for shape in ((400, 300), (300, 500), (260, 260))
    for decay in (0.0, 0.01, 0.3)
]


@pytest.mark.parametrize("matrix", MATRICES, ids=lambda m: "x".join(map(str, m.shape)))
@pytest.mark.parametrize("rank", [1, 2, 7, 40, 260])
def test_no_matrix_of_the_rank_is_nearer(matrix: np.ndarray, rank: int) -> None:
    found = truncate(matrix, rank)
    best = shares(matrix)[rank - 1]
    error = matrix - found.left @ found.right
    lost = np.vdot(error, error) / np.vdot(matrix, matrix)
    assert found.kept == pytest.approx(best, abs=1e-9)
    assert 1 - lost == pytest.approx(found.kept, abs=1e-12)
    assert found.rank <= rank


@pytest.mark.parametrize("matrix", MATRICES, ids=lambda m: "x".join(map(str, m.shape)))
@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.999])
def test_the_least_rank_that_keeps_the_share(matrix: np.ndarray, share: float) -> None:
    found = truncate_to_energy(matrix, share)
    best = np.concatenate([[0.0], shares(matrix)])
    assert best[found.rank - 1] < share <= found.kept + 1e-12
    assert found.kept == pytest.approx(best[found.rank], abs=1e-12)


def test_factors_are_balanced_and_orthogonal() -> None:
    found = truncate(MATRICES[1], 5)
    left, right = found.left.T @ found.left, found.right @ found.right.T
    np.testing.assert_allclose(left, right, atol=1e-10 * left.max())
    np.testing.assert_allclose(left, np.diag(np.diag(left)), atol=1e-8 * left.max())


@pytest.mark.parametrize("shape", [(40, 60), (60, 40)])
def test_all_of_it_comes_back_at_full_rank(shape: tuple[int, int]) -> None:
    matrix = spectrum(shape, 0.5)  # down to 1e-9 of the largest singular value
    found = truncate_to_energy(matrix, 1.0)
    np.testing.assert_allclose(found.left @ found.right, matrix, atol=1e-7 * abs(matrix).max())
    found = truncate(matrix, 40)
    np.testing.assert_allclose(found.left @ found.right, matrix, atol=1e-13 * abs(matrix).max())


def test_bounds_of_the_rank() -> None:
    matrix = MATRICES[0]
    assert truncate_to_energy(matrix, 0.01, least=9).rank == 9
    assert truncate_to_energy(matrix, 0.99, most=9).rank == 9
    assert truncate_to_energy(matrix, 0.99, least=1000).rank == 300


def test_a_matrix_of_low_rank_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(3)
    matrix = draw.standard_normal((400, 5)) @ draw.standard_normal((5, 300))
    for found in (truncate(matrix, 8), truncate(matrix, 100), truncate_to_energy(matrix, 1.0)):
        assert found.rank == 5
        assert found.kept == pytest.approx(1, abs=1e-12)
        np.testing.assert_allclose(found.left @ found.right, matrix, atol=1e-9)
    # Where the Krylov space gains nothing for long, the decomposition takes over.
    monkeypatch.setattr(truncation, "_GROWTH", -1.0)
    assert truncate(matrix, 8).rank == 5


def test_a_zero_matrix() -> None:
    found = truncate(np.zeros((4, 3)), 2)
    assert (found.rank, found.kept) == (0, 1.0)
    assert (found.left @ found.right).shape == (4, 3)
