"""TSV and Iso against the published algorithms, on matrices of full rank and short of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isthmus.errors import MethodError
from isthmus.methods.matrix import orthogonalized, shared_rank
from isthmus.methods.registry import METHODS
from isthmus.methods.tsv import rank_share

from . import references
from .streams import run

NAMES = ["tsv", "iso_c", "iso_cts"]


def experts(count: int, m: int, n: int, rank: int | None = None) -> np.ndarray:
    draw = np.random.default_rng(count + m)
    if rank is None:
        return draw.standard_normal((count, m, n))
    return draw.standard_normal((count, m, rank)) @ draw.standard_normal((count, rank, n))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(12, 12), (20, 13), (11, 30)])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_on_full_rank_it_is_the_published_algorithm(name, shape, count):
    deltas = experts(count, *shape)
    base = np.random.default_rng(0).standard_normal(shape)
    weights = tuple(np.linspace(0.5, 1.5, count))
    expected = base + 0.7 * getattr(references, name)(deltas * np.reshape(weights, (-1, 1, 1)))
    found = run(METHODS[name], base + deltas, base, weight=weights, **{"lambda": 0.7})
    np.testing.assert_allclose(found, expected, atol=1e-10)


@pytest.mark.parametrize("fraction", [0.0, 0.33, 0.5, 1.0])
def test_the_common_share_is_what_it_is_told(fraction):
    deltas = experts(3, 14, 9)
    found = run(
        METHODS["iso_cts"], deltas, np.zeros((14, 9)), weight=1.0, common_space_fraction=fraction
    )
    np.testing.assert_allclose(found, references.iso_cts(deltas, fraction), atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
def test_it_turns_along_with_rotations(name):
    """So that the core, which is a rotation, gives what the full matrices give."""
    draw = np.random.default_rng(1)
    deltas = experts(3, 18, 15, rank=4)
    left, right = (np.linalg.qr(draw.standard_normal((k, k)))[0] for k in (18, 15))
    plain = run(METHODS[name], deltas, np.zeros((18, 15)), weight=1.0)
    turned = run(METHODS[name], left @ deltas @ right, np.zeros((18, 15)), weight=1.0)
    np.testing.assert_allclose(turned, left @ plain @ right, atol=1e-9)


@pytest.mark.parametrize("name", ["iso_c", "iso_cts"])
@pytest.mark.parametrize("rank", [None, 3])
def test_iso_gives_a_flat_spectrum_and_zero_directions_none(name, rank):
    merged = run(METHODS[name], experts(2, 13, 10, rank), np.zeros((13, 10)), weight=1.0)
    values = np.linalg.svd(merged, compute_uv=False)
    size = 10 if rank is None else 6
    np.testing.assert_allclose(values[:size], values[0], rtol=1e-9)
    np.testing.assert_allclose(values[size:], 0, atol=1e-9)


def test_tsv_of_equal_experts_is_their_leading_part():
    """Dependent directions are no reason for arbitrary ones."""
    delta = experts(1, 12, 12)
    merged = run(METHODS["tsv"], np.repeat(delta, 3, axis=0), np.zeros((12, 12)), weight=1.0)
    u, s, v = np.linalg.svd(delta[0])
    np.testing.assert_allclose(merged, (u[:, :4] * s[:4]) @ v[:4], atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(5,), (2, 3, 4), ()])
def test_what_is_no_matrix_is_averaged(name, shape):
    deltas = np.random.default_rng(2).standard_normal((4, *shape))
    merged = run(METHODS[name], deltas, np.zeros(shape), weight=1.0)
    np.testing.assert_allclose(merged, deltas.mean(axis=0), atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_experts_that_changed_nothing_do_not_count(name):
    deltas = experts(3, 9, 8)
    padded = np.concatenate([deltas, np.zeros((2, 9, 8))])
    zero = np.zeros((9, 8))
    one, other = (run(METHODS[name], x, zero, weight=1.0) for x in (deltas, padded))
    np.testing.assert_allclose(other, one, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_not_finite_matrices_are_refused(name):
    deltas = experts(2, 4, 4)
    deltas[1, 2, 2] = np.nan
    with pytest.raises(MethodError, match=f"{name} decomposes matrices"):
        run(METHODS[name], deltas, np.zeros((4, 4)), weight=1.0)


@pytest.mark.parametrize(
    ("ranks", "total", "share"),
    [([8, 8], 8, 4), ([8, 8, 8], 8, 2), ([4, 16], 20, 16), ([4, 16], 12, 8), ([5, 5, 5], 2, 1)],
)
def test_the_share_of_the_rank(ranks, total, share):
    assert rank_share(ranks, total) == share


def test_the_shared_rank_counts_common_directions_once():
    deltas = torch.from_numpy(experts(3, 18, 15, rank=2))
    assert shared_rank(deltas, [2, 2, 2]) == 6
    assert shared_rank(deltas[[0, 0]], [2, 2]) == 2
    assert shared_rank(torch.from_numpy(experts(2, 6, 4)), [4, 4]) == 4


def test_orthogonalising_is_the_polar_factor():
    columns = torch.from_numpy(experts(1, 9, 4)[0])
    nearest = orthogonalized(columns)
    torch.testing.assert_close(nearest.mT @ nearest, torch.eye(4).double())
    product = nearest.mT @ columns
    torch.testing.assert_close(product, product.mT)
    assert (torch.linalg.eigvalsh(product) > 0).all()
