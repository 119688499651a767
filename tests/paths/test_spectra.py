"""Spectra against numpy and scipy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch

from isthmus.errors import PathError
from isthmus.paths.curves import Linear
from isthmus.paths.path import Path
from isthmus.paths.spectra import spectra_along, spectrum


def matrix(rows=12, columns=30, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (8, 3, 3, 3), (1, 5)])
def test_figures_are_those_of_numpy_and_scipy(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    flat = w.reshape(shape[0], -1).numpy()
    s = scipy.linalg.svdvals(flat)
    found = spectrum(w)
    np.testing.assert_allclose(found.singular_values.numpy(), s, rtol=1e-12)
    frobenius, operator = np.linalg.norm(flat), np.linalg.norm(flat, 2)
    assert found.operator_norm == pytest.approx(operator)
    assert found.frobenius_norm == pytest.approx(frobenius)
    assert found.max_norm == pytest.approx(np.abs(flat).max())
    assert found.stable_rank == pytest.approx((frobenius / operator) ** 2)
    assert found.effective_rank == pytest.approx(np.exp(scipy.stats.entropy(s / s.sum())))
    head = -(-len(s) // 10)
    assert found.tail_mass == pytest.approx(1 - (s[:head] ** 2).sum() / (s**2).sum(), abs=1e-12)


def test_equal_singular_values_fill_the_ranks_and_rank_one_does_not():
    orthogonal = scipy.stats.ortho_group.rvs(20, random_state=0)
    full = spectrum(3 * torch.from_numpy(orthogonal))
    assert full.stable_rank == pytest.approx(20)
    assert full.effective_rank == pytest.approx(20)
    assert full.tail_mass == pytest.approx(0.9)
    one = spectrum(torch.outer(matrix()[0], matrix()[1]))
    assert one.stable_rank == pytest.approx(1)
    assert one.effective_rank == pytest.approx(1, abs=1e-6)
    assert one.tail_mass == pytest.approx(0, abs=1e-12)


def test_a_zero_matrix_has_rank_zero():
    zero = spectrum(torch.zeros(3, 4))
    assert (zero.stable_rank, zero.effective_rank, zero.tail_mass, zero.max_norm) == (0, 0, 0, 0)


def test_along_a_path():
    a = {"one": matrix(seed=1), "two": matrix(6, 6, seed=2), "b": torch.ones(3)}
    b = {"one": matrix(seed=3), "two": matrix(6, 6, seed=4), "b": torch.ones(3)}
    path = Path(Linear(), (a, b))
    ts = [0.0, 0.3, 1.0]
    found = spectra_along(path, ts, decay=0.1)
    assert list(found.by_name) == ["one", "two"]
    midpoint = 0.7 * a["one"] + 0.3 * b["one"]
    np.testing.assert_allclose(
        found.singular_values("one")[1].numpy(), np.linalg.svd(midpoint.numpy())[1], rtol=1e-12
    )
    assert found.singular_values("one").shape == (3, 12)
    ranks = [spectrum(path.tensor(t, "two")).stable_rank for t in ts]
    assert found.series("stable_rank", "two") == pytest.approx(ranks)
    both = [spectrum(path.tensor(0.3, name)).stable_rank for name in ("one", "two")]
    assert found.series("stable_rank")[1] == pytest.approx(sum(both) / 2)
    assert found.saturation("one")[1] == pytest.approx(0.1 * np.linalg.norm(midpoint.numpy(), 2))
    largest = 0.1 * float(midpoint.abs().max())
    assert found.saturation("one", "max_norm")[1] == pytest.approx(largest)


def test_histograms_share_their_edges_and_count_every_value():
    a, b = {"w": matrix(seed=1)}, {"w": 2 * matrix(seed=2)}
    found = spectra_along(Path(Linear(), (a, b)), [0.0, 0.5, 1.0], ["w"])
    edges, densities = found.histogram("w", bins=7)
    widths = edges.diff()
    values = found.singular_values("w")
    assert float(edges[-1]) == pytest.approx(float(values.max()))
    for row, density in zip(values, densities, strict=True):
        counted, _ = np.histogram(row.numpy(), edges.numpy())
        np.testing.assert_allclose((density * widths * 12).numpy(), counted, atol=1e-9)


def test_zero_matrices_have_a_histogram():
    zero = {"w": torch.zeros(4, 4)}
    _, densities = spectra_along(Path(Linear(), (zero, zero)), [0.5], ["w"]).histogram("w")
    assert torch.isfinite(densities).all()


def test_refusals():
    with pytest.raises(PathError, match="no singular values"):
        spectrum(torch.ones(4))
    with pytest.raises(PathError, match="no singular values"):
        spectrum(torch.ones(4, 0))
    path = Path(Linear(), ({"w": matrix() / 0}, {"w": matrix()}))
    with pytest.raises(PathError, match="'w': A matrix holds NaN or infinity"):
        spectra_along(path, [0.5])
    plain = Path(Linear(), ({"w": torch.ones(3)}, {"w": torch.ones(3)}))
    with pytest.raises(PathError, match="No matrix"):
        spectra_along(plain, [0.5])
    with pytest.raises(PathError, match="decay="):
        spectra_along(Path(Linear(), ({"w": matrix()},) * 2), [0.5]).saturation("w")
