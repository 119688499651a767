"""Low-rank matrices: polar points, their gauge, alignment, three distances."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from isthmus.errors import MethodError
from isthmus.geometry.euclidean import random_orthogonal
from isthmus.geometry.fixed_rank import FixedRank, Polar
from isthmus.geometry.frechet import frechet_mean
from isthmus.geometry.low_rank import low_rank_distance, low_rank_mean
from isthmus.geometry.manifold import GeometryWarning
from isthmus.geometry.quotient import Quotient

DISTANCES = ["canonical", "grassmann", "projection"]


def cluster(m, n, r, count, spread, seed):
    """Polar points of adapters that share a trunk."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scales = torch.logspace(0, -0.5, r, dtype=torch.float64)
    left, right = normal(m, r) * scales, normal(r, n)
    return [
        Polar.of_pair(left + spread * normal(m, r) * scales, right + spread * normal(r, n))
        for _ in range(count)
    ]


def test_a_pair_becomes_a_polar_point_without_its_product(generator):
    left = torch.randn(40, 5, generator=generator)
    right = torch.randn(5, 30, generator=generator)
    x = Polar.of_pair(left, right, scale=2.0)
    FixedRank(40, 30, 5).point(x)
    product = 2 * left.double() @ right.double()
    torch.testing.assert_close(x.matrix(), product, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.diagonal(x.b), torch.linalg.svdvals(product)[:5])
    one, two = x.pair()
    torch.testing.assert_close(one @ two, product, rtol=0, atol=1e-12)
    u, s, v = torch.linalg.svd(product)
    best = (u[:, :3] * s[:3]) @ v[:3]
    torch.testing.assert_close(
        Polar.of_pair(left, right, scale=2.0, rank=3).matrix(), best, rtol=0, atol=1e-12
    )


def test_a_negative_scale_goes_into_the_frames(generator):
    left = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    right = torch.randn(2, 8, generator=generator, dtype=torch.float64)
    x = Polar.of_pair(left, right, scale=-1.0)
    FixedRank(9, 8, 2).point(x)
    torch.testing.assert_close(x.matrix(), -left @ right, rtol=0, atol=1e-12)


def test_pairs_that_are_no_point():
    ones = torch.ones(6, 2)
    with pytest.raises(MethodError, match="has rank 1") as refusal:
        Polar.of_pair(ones, ones.mT)
    assert refusal.value.cure == "pass rank=1"
    with pytest.raises(MethodError, match="has rank 0") as refusal:
        Polar.of_pair(torch.zeros(6, 2), ones.mT)
    assert "leave this expert out" in refusal.value.cure
    with pytest.raises(MethodError, match="do not multiply"):
        Polar.of_pair(ones, ones)
    with pytest.raises(MethodError, match="NaN"):
        Polar.of_pair(ones * math.nan, ones.mT)


def test_gauge_is_the_orthogonal_projection_on_the_orbit(generator):
    total = FixedRank(7, 6, 4)
    x = total.random(generator)
    t = total.random_tangent(generator, x)
    rest = Quotient(total).project(x, t)
    for i in range(4):
        for j in range(i):
            omega = torch.zeros(4, 4, dtype=torch.float64)
            omega[i, j], omega[j, i] = 1, -1
            assert abs(float(total.inner(x, rest, total.vertical(x, omega)))) < 1e-13


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.floats(0.05, 0.7 * math.pi))
def test_aligned_logarithm_is_horizontal_and_exact(seed, length):
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    total = FixedRank(20, 15, 3)
    quotient = Quotient(total)
    x = quotient.random(generator)
    u = quotient.scale(length, quotient.random_tangent(generator, x))
    y = quotient.exp(x, u)
    found = quotient.logarithm(x, y.turned(random_orthogonal(generator, 3, 3)))
    assert found.length <= length + 1e-11
    if found.certified:
        assert float(total.gauge(x, found.tangent).abs().max()) < 1e-8
    assert found.converged
    torch.testing.assert_close(
        quotient.exp(x, found.tangent).matrix(), y.matrix(), rtol=0, atol=1e-8
    )


def test_alignment_against_a_search_over_all_gauges(generator):
    """For r = 2 the gauges are an angle and a determinant: an independent search finds no better."""
    total = FixedRank(9, 8, 2)
    x = total.random(generator)
    y = total.exp(x, total.scale(1.2, total.random_tangent(generator, x)))

    def squared(angle, sign):
        c, s = math.cos(angle), math.sin(angle)
        o = torch.tensor([[c, -s * sign], [s, c * sign]], dtype=torch.float64)
        return float(total.logarithm(x, y.turned(o)).length ** 2)

    best = math.inf
    for sign in (1, -1):
        grid = np.linspace(-math.pi, math.pi, 25)
        start = min(grid, key=lambda angle: squared(angle, sign))
        found = minimize(
            lambda a, sign=sign: squared(a[0], sign), [start], method="Nelder-Mead", tol=1e-10
        )
        best = min(best, found.fun)
    assert float(Quotient(total).dist(x, y) ** 2) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("distance", DISTANCES)
def test_distances_see_matrices_not_gauges(distance, generator):
    x, y = cluster(20, 16, 4, 2, 0.2, seed=1)
    plain = low_rank_distance(x, y, distance)
    turned = low_rank_distance(
        x.turned(random_orthogonal(generator, 4, 4)),
        y.turned(random_orthogonal(generator, 4, 4)),
        distance,
    )
    torch.testing.assert_close(turned, plain, rtol=0, atol=1e-10)
    torch.testing.assert_close(low_rank_distance(y, x, distance), plain, rtol=0, atol=1e-10)
    assert plain > 0.1
    assert low_rank_distance(x, x, distance) < 1e-10


def test_distances_of_near_points_agree_where_only_the_core_differs():
    x = cluster(20, 16, 4, 1, 0.1, seed=2)[0]
    y = Polar(x.u, 1.5 * x.b, x.v)
    for distance in DISTANCES:
        assert float(low_rank_distance(x, y, distance)) == pytest.approx(
            2 * math.log(1.5), abs=1e-10
        )


@pytest.mark.parametrize("distance", DISTANCES)
def test_order_and_gauge_change_no_mean(distance, generator):
    points = cluster(20, 16, 3, 3, 0.15, seed=3)
    weights = [0.5, 0.3, 0.2]
    plain = low_rank_mean(points, weights, distance=distance)
    assert plain.converged
    shuffled = low_rank_mean(
        [points[k].turned(random_orthogonal(generator, 3, 3)) for k in (2, 0, 1)],
        [weights[k] for k in (2, 0, 1)],
        distance=distance,
    )
    scale = float(plain.mean.matrix().norm())
    gap = float((shuffled.mean.matrix() - plain.mean.matrix()).norm())
    assert gap <= 1e-10 * scale


@pytest.mark.parametrize("distance", DISTANCES)
def test_equal_points_are_their_own_mean(distance, generator):
    x = cluster(12, 10, 3, 1, 0.1, seed=4)[0]
    points = [x.turned(random_orthogonal(generator, 3, 3)) for _ in range(3)]
    mean = low_rank_mean(points, [1, 2, 3], distance=distance)
    assert mean.converged
    torch.testing.assert_close(mean.mean.matrix(), x.matrix(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("distance", DISTANCES)
def test_negated_frames_are_the_same_matrix(distance):
    """The Euclidean mean of the factors of one matrix in two gauges is zero; this one is not."""
    x = cluster(12, 10, 3, 1, 0.1, seed=5)[0]
    mean = low_rank_mean([x, x.turned(-torch.eye(3, dtype=torch.float64))], distance=distance)
    torch.testing.assert_close(mean.mean.matrix(), x.matrix(), rtol=1e-10, atol=1e-10)


def test_unrelated_adapters_are_told_apart_from_certified_ones():
    generator = torch.Generator().manual_seed(6)
    x, y = (
        Polar.of_pair(
            torch.randn(60, 4, generator=generator), torch.randn(4, 50, generator=generator)
        )
        for _ in range(2)
    )
    found = Quotient(FixedRank(60, 50, 4)).logarithm(x, y)
    assert not found.certified
    assert float(low_rank_distance(x, y, "grassmann")) > math.pi / 2


def test_what_a_low_rank_mean_refuses():
    x, y = cluster(12, 10, 3, 2, 0.1, seed=7)
    thin = Polar.of_pair(*y.pair(), rank=2)
    with pytest.raises(MethodError, match="ranks") as refusal:
        low_rank_mean([x, thin])
    assert "rank=2" in refusal.value.cure
    with pytest.raises(MethodError, match="no points"):
        low_rank_mean([])
    with pytest.raises(MethodError, match="no distance"):
        low_rank_mean([x, y], distance="euclidean")
    with pytest.raises(MethodError, match="squared loss"):
        low_rank_mean([x, y], distance="grassmann", loss="median")
    with pytest.raises(MethodError, match="not positive definite"):
        low_rank_distance(x, Polar(x.u, -x.b, x.v))
    with pytest.raises(MethodError, match="not orthonormal"):
        low_rank_distance(x, Polar(2 * x.u, x.b, x.v))


def test_an_unsettled_mean_warns():
    x, y = cluster(12, 10, 3, 2, 0.3, seed=8)
    with pytest.warns(GeometryWarning, match="not converged"):
        frechet_mean(
            [x, y, y], None, Quotient(FixedRank(12, 10, 3)), tolerance=1e-30, max_iterations=2
        )
