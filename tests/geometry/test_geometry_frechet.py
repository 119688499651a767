"""Fréchet means: closed forms, known geodesics, monotone descent, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from scipy.optimize import minimize

from isthmus.errors import MethodError
from isthmus.geometry.euclidean import Euclidean, Sphere
from isthmus.geometry.frechet import _Descent, frechet_mean
from isthmus.geometry.manifold import GeometryWarning
from isthmus.geometry.spd import SPD
from isthmus.geometry.stiefel import Stiefel

from .manifolds import MANIFOLDS

LOSSES = [("squared", None), ("huber", 0.3), ("median", None)]


def around(manifold, generator, lengths):
    x = manifold.random(generator)
    return [
        manifold.exp(x, manifold.scale(length, manifold.random_tangent(generator, x)))
        for length in lengths
    ]


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
@pytest.mark.parametrize(("loss", "delta"), LOSSES)
def test_descent_is_monotone_and_ends_in_a_critical_point(manifold, loss, delta, generator):
    points = around(manifold, generator, (0.2, 0.5, 0.1, 0.4))
    found = frechet_mean(points, [1, 2, 1, 0.5], manifold, loss=loss, delta=delta)
    assert found.converged
    assert found.certified.all()
    assert found.gradient_norm <= 1e-10
    steps = np.diff(found.functional)
    assert (steps <= 1e-12 * found.functional[0]).all()


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
def test_order_does_not_matter(manifold, generator):
    points = around(manifold, generator, (0.2, 0.5, 0.1))
    one = frechet_mean(points, [1, 2, 3], manifold).mean
    two = frechet_mean(points[::-1], [3, 2, 1], manifold).mean
    assert float(manifold.dist(one, two)) < 1e-10


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
def test_mean_of_points_on_one_geodesic(manifold, generator):
    x = manifold.random(generator)
    u = manifold.random_tangent(generator, x)
    times, weights = torch.tensor([-0.3, 0.1, 0.4], dtype=torch.float64), [1.0, 2.0, 1.0]
    points = [manifold.exp(x, manifold.scale(float(t), u)) for t in times]
    found = frechet_mean(points, weights, manifold)
    expected = manifold.exp(x, manifold.scale(float(times @ torch.tensor(weights).double() / 4), u))
    assert float(manifold.dist(found.mean, expected)) < 1e-10


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
@pytest.mark.parametrize(("loss", "delta"), [("squared", None), ("huber", 10.0)])
def test_two_points_divide_their_geodesic(manifold, loss, delta, generator):
    x, y = around(manifold, generator, (0.3, 0.3))
    found = frechet_mean([x, y], [1, 3], manifold, loss=loss, delta=delta)
    whole = float(manifold.dist(x, y))
    assert float(manifold.dist(x, found.mean)) == pytest.approx(0.75 * whole, abs=1e-10)
    assert float(manifold.dist(y, found.mean)) == pytest.approx(0.25 * whole, abs=1e-10)


@pytest.mark.parametrize("manifold", MANIFOLDS, ids=str)
@pytest.mark.parametrize(("loss", "delta"), LOSSES)
def test_one_point_and_equal_points(manifold, loss, delta, generator):
    x = manifold.random(generator)
    for points in ([x], [x, x, x]):
        found = frechet_mean(points, None, manifold, loss=loss, delta=delta)
        assert found.converged
        assert float(manifold.dist(found.mean, x)) < 1e-12


def test_spd_mean_of_two_in_closed_form(generator):
    """A^½ (A^−½ B A^−½)^½ A^½."""
    spd = SPD(5)
    a, b = spd.random(generator), spd.random(generator)
    root = sqrtm(a.numpy())
    inverse = np.linalg.inv(root)
    expected = root @ sqrtm(inverse @ b.numpy() @ inverse) @ root
    np.testing.assert_allclose(frechet_mean([a, b], None, spd).mean.numpy(), expected, atol=1e-12)
    # The same with one point split in two, which takes the iteration.
    found = frechet_mean([a, b, b], [2, 1, 1], spd)
    assert len(found.functional) > 1
    np.testing.assert_allclose(found.mean.numpy(), expected, atol=1e-9)


def test_spd_mean_commutes_with_inversion_and_congruence(generator):
    spd = SPD(4)
    points = [spd.random(generator) for _ in range(4)]
    mean = frechet_mean(points, None, spd).mean
    inverses = frechet_mean([torch.linalg.inv(x) for x in points], None, spd).mean
    assert float(spd.dist(inverses, torch.linalg.inv(mean))) < 1e-9
    move = spd.isometry(generator)
    moved = frechet_mean([move(x) for x in points], None, spd).mean
    assert float(spd.dist(moved, move(mean))) < 1e-9


def test_commuting_matrices_have_the_geometric_mean():
    diagonals = torch.tensor([[1.0, 1e3, 1e-2], [2.0, 1.0, 10.0], [0.5, 3.0, 1.0]]).double()
    found = frechet_mean(list(torch.diag_embed(diagonals)), None, SPD(3))
    torch.testing.assert_close(torch.diagonal(found.mean), diagonals.log().mean(0).exp())


def test_euclidean_mean_is_the_mean():
    points = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(1)).double()
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()
    found = frechet_mean(list(points), weights, Euclidean(3, 2))
    torch.testing.assert_close(found.mean, torch.tensordot(weights / 10, points, dims=1))


@pytest.mark.parametrize(("loss", "delta"), [("median", None), ("huber", 0.5)])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_robust_means_against_a_search_without_gradients(loss, delta, seed):
    points = np.random.default_rng(seed).normal(size=(5, 2))

    def functional(x):
        d = np.linalg.norm(points - x, axis=1)
        if loss == "huber":
            d = np.where(d <= delta, d**2 / 2, delta * (d - delta / 2))
        return d.mean()

    found = frechet_mean(list(torch.from_numpy(points)), None, Euclidean(2), loss=loss, delta=delta)
    assert found.converged
    options = {"xatol": 1e-9, "fatol": 1e-13, "maxiter": 4000}
    searched = minimize(functional, points.mean(0), method="Nelder-Mead", options=options)
    assert found.functional[-1] <= searched.fun + 1e-12


def test_a_heavy_point_is_the_median_and_an_outlier_does_not_move_it():
    sphere = Sphere(3)
    points = around(sphere, torch.Generator().manual_seed(2), (0.1, 0.2, 0.3, 1.2))
    found = frechet_mean(points, [3, 1, 0.5, 0.5], sphere, loss="median")
    assert found.converged
    torch.testing.assert_close(found.mean, points[0])


def test_median_resists_an_outlier_better_than_the_mean(generator):
    stiefel = Stiefel(8, 2)
    x = stiefel.random(generator)
    near = [stiefel.exp(x, 0.05 * stiefel.random_tangent(generator, x)) for _ in range(4)]
    points = [*near, stiefel.exp(x, 1.0 * stiefel.random_tangent(generator, x))]
    median = frechet_mean(points, None, stiefel, loss="median").mean
    mean = frechet_mean(points, None, stiefel).mean
    assert stiefel.dist(x, median) < 0.05 < 0.15 < stiefel.dist(x, mean)


def test_it_says_when_it_did_not_converge(generator):
    spd = SPD(3)
    points = [spd.random(generator) for _ in range(3)]
    with pytest.warns(GeometryWarning, match="not converged"):
        found = frechet_mean(points, None, spd, max_iterations=1)
    assert not found.converged
    assert found.gradient_norm > 1e-10


def test_bad_input_is_refused(generator):
    spd = SPD(3)
    x = spd.random(generator)
    cases = [
        (([], None), {}, "no points", "at least one"),
        (([x, x], [1.0, -1.0]), {}, "no shares", "none negative"),
        (([x, x], [0.0, 0.0]), {}, "no shares", "at least one positive"),
        (([x, x], [1.0, math.nan]), {}, "no shares", "finite"),
        (([x, x], [1.0]), {}, "weights of shape", "one weight for each"),
        (([x, x], None), {"loss": "cubic"}, "no loss", "median"),
        (([x, x], None), {"loss": "huber"}, "delta None", "positive delta"),
        (([x, x], None), {"delta": 1.0}, "delta 1.0", "no other loss"),
        (([x, -x], None), {}, "not positive definite", "identity"),
        (([x, x * math.nan], None), {}, "NaN", "leave this expert out"),
        (([x, x + torch.triu(x, 1)], None), {}, "not symmetric", "(B + Bᵀ)/2"),
    ]
    for (points, weights), options, problem, cure in cases:
        with pytest.raises(MethodError) as refusal:
            frechet_mean(points, weights, spd, **options)
        assert problem in refusal.value.problem
        assert cure in refusal.value.cure
    with pytest.raises(MethodError, match="not length 1"):
        frechet_mean([torch.ones(3)], None, Sphere(3))


def test_a_step_too_long_for_numbers_is_halved(generator, monkeypatch):
    manifold = SPD(3)
    points = list(manifold.random(generator, (4,)))
    plain = frechet_mean(points, None, manifold)
    taken = _Descent.next_step
    calls = []

    def long(self, step, new):
        calls.append(1e6 if not calls else 1.0)
        return calls[-1] * taken(self, step, new)

    monkeypatch.setattr(_Descent, "next_step", long)
    found = frechet_mean(points, None, manifold)
    assert calls[0] == 1e6
    assert found.converged
    torch.testing.assert_close(found.mean, plain.mean, rtol=1e-9, atol=1e-9)
