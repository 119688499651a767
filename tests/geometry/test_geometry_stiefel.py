"""The Stiefel logarithm: against scipy, against the geodesic equation, at and beyond its radius."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.linalg import expm, logm

from isthmus.errors import MethodError
from isthmus.geometry.linalg import rotation_log
from isthmus.geometry.manifold import GeometryWarning
from isthmus.geometry.stiefel import INJECTIVITY_RADIUS, Stiefel


def away(n, p, length, seed):
    """A point, a tangent vector of this length, and where its geodesic ends."""
    generator = torch.Generator().manual_seed(seed)
    manifold = Stiefel(n, p)
    x = manifold.random(generator)
    u = length * manifold.random_tangent(generator, x)
    return manifold, x, u, manifold.exp(x, u)


@pytest.mark.parametrize(("n", "p", "share"), [(256, 32, 0.85), (64, 8, 0.5), (100, 1, 0.85)])
def test_round_trip_in_about_five_iterations(n, p, share):
    manifold, x, u, y = away(n, p, share * math.pi, seed=1)
    found = manifold.logarithm(x, y)
    assert float(torch.linalg.norm(manifold.exp(x, found.tangent) - y)) <= 1e-12
    assert float(torch.linalg.norm(found.tangent - u)) <= 1e-12
    assert float(found.length) == pytest.approx(share * math.pi, abs=1e-12)
    assert found.iterations <= 6
    assert found.certified


@pytest.mark.parametrize(("n", "p"), [(6, 4), (5, 4), (40, 30), (4, 2), (4, 4)])
def test_fewer_rows_than_twice_the_columns(n, p):
    manifold, x, u, y = away(n, p, 0.8 * math.pi, seed=2)
    found = manifold.logarithm(x, y)
    assert found.certified
    assert float(torch.linalg.norm(found.tangent - u)) <= 1e-10


@pytest.mark.parametrize(("n", "p"), [(7, 3), (5, 4), (6, 1)])
def test_exponential_solves_the_geodesic_equation(n, p):
    """Ü + U̇U̇ᵀU + U((UᵀU̇)² + U̇ᵀU̇) = 0 (Edelman, Arias and Smith 1998, equation 2.41)."""
    _, x, u, y = away(n, p, 1.3, seed=3)

    def flow(_, state):
        a, b = state.reshape(2, n, p)
        acceleration = -(b @ b.T @ a) - a @ ((a.T @ b) @ (a.T @ b) + b.T @ b)
        return np.concatenate([b.ravel(), acceleration.ravel()])

    start = np.concatenate([x.numpy().ravel(), u.numpy().ravel()])
    end = solve_ivp(flow, (0, 1), start, method="DOP853", rtol=1e-12, atol=1e-13).y[:, -1]
    np.testing.assert_allclose(y.numpy().ravel(), end[: n * p], atol=1e-10)


def test_exponential_against_the_quotient_of_the_orthogonal_group():
    """Exp_U(D) = exp(DUᵀ − UDᵀ + UDᵀUUᵀ) U, the one-parameter group of O(n) whose orbit it is."""
    _, x, u, y = away(8, 3, 1.7, seed=4)
    a, d = x.numpy(), u.numpy()
    generator = d @ a.T - a @ d.T + a @ d.T @ a @ a.T
    np.testing.assert_allclose(y.numpy(), expm(generator) @ a, atol=1e-13)


@pytest.mark.parametrize("n", [2, 3, 8, 31])
@pytest.mark.parametrize("angle", [1e-9, 1e-3, 0.5, 0.9])
def test_logarithm_of_a_rotation_against_scipy(n, angle):
    noise = np.random.default_rng(n).normal(size=(n, n))
    skew = (noise - noise.T) / np.linalg.norm(noise - noise.T, 2) * angle * math.pi
    v = expm(skew)
    ours = rotation_log(torch.from_numpy(v)).numpy()
    np.testing.assert_allclose(ours, skew, atol=1e-12)
    np.testing.assert_allclose(ours, np.real(logm(v)), atol=1e-10)


def test_square_frames_are_rotations():
    manifold, x, _, y = away(5, 5, 0.7 * math.pi, seed=5)
    log = np.real(logm((x.mT @ y).numpy()))
    assert float(manifold.dist(x, y)) == pytest.approx(
        np.linalg.norm(log) / math.sqrt(2), abs=1e-12
    )
    reflected = y.clone()
    reflected[:, 0] *= -1
    with pytest.raises(MethodError, match="opposite determinants") as refusal:
        manifold.log(x, reflected)
    assert "flip the sign" in refusal.value.cure


def test_beyond_the_radius_it_reports():
    manifold, x, _, y = away(256, 32, 3 * math.pi, seed=6)
    begin = time.perf_counter()
    found = manifold.logarithm(x, y)
    assert time.perf_counter() - begin < 20
    assert not found.certified
    assert not found.converged
    assert found.residual > 1e-10
    with pytest.warns(GeometryWarning, match="no geodesic"):
        manifold.dist(x, y)


def test_converged_but_too_long_is_not_certified():
    manifold, x, _, y = away(512, 64, 1.5 * math.pi, seed=7)
    found = manifold.logarithm(x, y)
    assert found.converged
    assert found.length > INJECTIVITY_RADIUS
    assert not found.certified


@pytest.mark.parametrize(("n", "p"), [(6, 2), (3, 2), (8, 1)])
def test_opposite_frames_end_without_error(n, p):
    manifold = Stiefel(n, p)
    x = manifold.random(torch.Generator().manual_seed(8))
    found = manifold.logarithm(x, -x)
    assert not found.certified
    assert torch.isfinite(found.tangent).all()


def test_a_batch_mixes_near_and_far():
    manifold, x, u, near = away(24, 6, 0.5, seed=9)
    far = manifold.exp(x, 2.9 * math.pi / 0.5 * u)
    found = manifold.logarithm(x, torch.stack([near, far, x]))
    assert found.certified.tolist() == [True, False, True]
    assert float(torch.linalg.norm(found.tangent[0] - u)) < 1e-12
    assert float(found.length[2]) < 1e-13


def test_bad_frames_are_refused():
    manifold, x, _, _ = away(6, 2, 0.5, seed=10)
    with pytest.raises(MethodError, match="not orthonormal") as refusal:
        manifold.log(2 * x, x)
    assert "torch.linalg.qr" in refusal.value.cure
    spoiled = x.clone()
    spoiled[0, 0] = math.nan
    with pytest.raises(MethodError, match="NaN"):
        manifold.log(x, spoiled)
    with pytest.raises(MethodError, match="does not end in"):
        manifold.log(x, x[:5])
    with pytest.raises(MethodError, match="floating torch tensor"):
        manifold.point(x.numpy())
    with pytest.raises(MethodError, match="do not fit"):
        Stiefel(2, 3)
