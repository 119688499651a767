"""The mean of low-rank matrices: against the general descent, known means, and far apart."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from isthmus.geometry.aligned_sum import AlignedSum, Move
from isthmus.geometry.euclidean import random_orthogonal
from isthmus.geometry.fixed_rank import FixedRank, Polar
from isthmus.geometry.frechet import frechet_mean, huber, median, squared
from isthmus.geometry.low_rank import low_rank_distance, low_rank_mean, stacked_mean
from isthmus.geometry.manifold import GeometryWarning
from isthmus.geometry.quotient import Quotient
from isthmus.geometry.quotient_mean import quotient_mean

DISTANCES = ["canonical", "grassmann", "projection"]
LOSSES = [("squared", None), ("huber", 0.5), ("median", None)]


def adapters(m, n, r, count, trunk, seed):
    """Polar points of B and A with Gaussian entries around a common trunk that many times larger."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scales = torch.logspace(0, -0.5, r, dtype=torch.float64)
    left, right = normal(m, r), normal(r, n)
    return [
        Polar.of_pair((trunk * left + normal(m, r)) * scales, trunk * right + normal(r, n))
        for _ in range(count)
    ]


def stack(points):
    return Polar(*(torch.stack(parts) for parts in zip(*points, strict=True)))


def gap(x, y):
    return float((x.matrix() - y.matrix()).norm() / y.matrix().norm())


@pytest.mark.parametrize(("loss", "delta"), LOSSES)
@pytest.mark.parametrize("trunk", [2.0, 6.0])
def test_against_the_descent_that_solves_every_alignment(loss, delta, trunk):
    points = adapters(12, 10, 2, 3, trunk, seed=1)
    weights = [0.5, 0.3, 0.2]
    fast = low_rank_mean(points, weights, loss=loss, delta=delta)
    slow = frechet_mean(points, weights, Quotient(FixedRank(12, 10, 2)), loss=loss, delta=delta)
    assert fast.converged
    assert slow.converged
    assert fast.functional[-1] == pytest.approx(slow.functional[-1], rel=1e-12)
    assert gap(fast.mean, slow.mean) < 1e-8


@pytest.mark.parametrize(("loss", "delta"), LOSSES)
@pytest.mark.parametrize("trunk", [0.0, 1.0, 4.0])
def test_every_step_lowers_the_functional(loss, delta, trunk):
    found = low_rank_mean(adapters(40, 30, 4, 4, trunk, seed=2), loss=loss, delta=delta)
    assert found.converged
    steps = np.diff(found.functional)
    assert (steps <= 1e-12 * found.functional[0]).all()


@pytest.mark.parametrize("trunk", [1.0, 4.0])
def test_logarithms_at_the_mean_are_horizontal_and_cancel(trunk):
    points = adapters(40, 30, 4, 5, trunk, seed=3)
    weights = torch.tensor([0.3, 0.3, 0.2, 0.1, 0.1], dtype=torch.float64)
    found = low_rank_mean(points, weights)
    assert found.converged
    total = FixedRank(40, 30, 4)
    log = Quotient(total).logarithm(found.mean, stack(points))
    torch.testing.assert_close(log.length, found.distances, rtol=0, atol=1e-9)
    assert float(total.gauge(found.mean, log.tangent).abs().max()) < 1e-8
    pull = total.combine(weights, log.tangent)
    assert float(total.norm(found.mean, pull)) < 1e-8


@pytest.mark.parametrize("length", [0.5, 2.0])
@pytest.mark.parametrize("distance", DISTANCES)
def test_two_points_divide_their_geodesic(distance, length, generator):
    quotient = Quotient(FixedRank(15, 12, 3))
    x = quotient.random(generator)
    y = quotient.exp(x, quotient.scale(length, quotient.random_tangent(generator, x)))
    found = low_rank_mean([x, y], [1, 1], distance=distance)
    assert found.converged
    if distance == "canonical":
        middle = quotient.exp(x, quotient.scale(0.5, quotient.log(x, y)))
        assert gap(found.mean, middle) < 1e-9
    torch.testing.assert_close(found.distances[0], found.distances[1], rtol=1e-6, atol=0)


def test_points_on_one_geodesic_have_the_mean_of_their_times(generator):
    quotient = Quotient(FixedRank(15, 12, 3))
    x = quotient.random(generator)
    u = quotient.random_tangent(generator, x)
    times, weights = torch.tensor([-0.5, 0.1, 0.2, 0.7]).double(), torch.tensor([1, 2, 1, 1.0])
    points = [
        quotient.exp(x, quotient.scale(float(t), u)).turned(random_orthogonal(generator, 3, 3))
        for t in times
    ]
    found = low_rank_mean(points, weights)
    expected = quotient.exp(x, quotient.scale(float(times @ weights.double() / 5), u))
    assert gap(found.mean, expected) < 1e-9


def test_the_span_of_the_frames_holds_the_mean():
    """The same descent in all 30 dimensions of both sides, and in the 12 that the frames span."""
    points = adapters(30, 30, 3, 4, 1.0, seed=4)
    share = torch.full((4,), 0.25, dtype=torch.float64)
    everywhere = quotient_mean(stack(points), share, squared)
    within = stacked_mean(stack(points), share)
    assert everywhere.converged
    assert gap(within.mean, everywhere.mean) < 1e-9
    span = torch.linalg.qr(torch.cat([x.u for x in points], dim=1)).Q
    outside = everywhere.mean.u - span @ (span.mT @ everywhere.mean.u)
    assert float(outside.norm()) < 1e-9


def test_frames_in_one_space_and_square_matrices(generator):
    """All in the span of the first, as when only B is trained; and m = n = r."""
    x = adapters(12, 10, 3, 1, 0.0, seed=5)[0]
    other = adapters(12, 10, 3, 1, 0.0, seed=6)[0]
    turned = [
        Polar.of_pair(
            x.u @ (torch.eye(3) + 0.3 * torch.randn(3, 3, generator=generator)).double(), w
        )
        for w in (x.v.mT, x.v.mT + 0.2 * other.v.mT)
    ]
    found = low_rank_mean([x, *turned])
    assert found.converged
    assert gap(Polar(x.u @ (x.u.mT @ found.mean.u), found.mean.b, found.mean.v), found.mean) < 1e-9
    squares = [
        Polar.of_pair(
            torch.eye(3).double() + 0.2 * torch.randn(3, 3, generator=generator).double(),
            torch.eye(3, dtype=torch.float64),
        )
        for _ in range(3)
    ]
    assert low_rank_mean(squares).converged


def test_a_reflected_matrix_of_full_rank_has_no_geodesic():
    """det > 0 and det < 0: every curve between them passes a singular matrix."""
    points = [
        Polar.of_pair(torch.diag(torch.tensor(d)).double(), torch.eye(3).double())
        for d in ([1.0, 2.0, 3.0], [1.0, 2.0, -3.0])
    ]
    with pytest.warns(GeometryWarning, match="not converged"):
        found = low_rank_mean(points)
    assert found.distances.isinf().all()
    assert not found.certified.any()
    assert torch.isfinite(found.mean.matrix()).all()


def test_a_point_without_weight_moves_nothing_and_is_measured():
    points = adapters(20, 17, 3, 3, 3.0, seed=7)
    without = low_rank_mean(points[:2], [0.5, 0.5])
    found = low_rank_mean(points, [0.5, 0.5, 0.0])
    assert gap(found.mean, without.mean) < 1e-12
    torch.testing.assert_close(found.distances[2], low_rank_distance(found.mean, points[2]))


def test_the_median_is_a_heavy_point_or_resists_an_outlier():
    near = adapters(20, 17, 3, 4, 8.0, seed=8)
    far = adapters(20, 17, 3, 1, 0.5, seed=9)
    heavy = low_rank_mean([*near, *far], [5, 1, 1, 1, 1], loss="median")
    assert heavy.converged
    assert gap(heavy.mean, near[0]) < 1e-9
    center = low_rank_mean(near).mean
    robust = low_rank_mean([*near, *far], loss="median").mean
    plain = low_rank_mean([*near, *far]).mean
    assert low_rank_distance(center, robust) < low_rank_distance(center, plain) / 2


@pytest.mark.parametrize("rho", [squared, median, huber(1.0)])
def test_a_single_point_is_its_own_mean(rho):
    x = adapters(9, 9, 2, 1, 0.0, seed=10)
    found = quotient_mean(stack(x), torch.ones(1, dtype=torch.float64), rho)
    assert found.converged
    assert gap(found.mean, x[0]) < 1e-13


def test_unrelated_adapters_converge_beyond_the_certified_radius():
    points = stack(adapters(512, 512, 8, 4, 0.0, seed=11))
    share = torch.full((4,), 0.25, dtype=torch.float64)
    found = quotient_mean(points, share, squared, max_evaluations=300)
    assert found.converged
    assert not found.certified.any()


def test_too_few_evaluations_end_where_the_valley_is_flat():
    points = stack(adapters(128, 128, 8, 4, 0.0, seed=11))
    share = torch.full((4,), 0.25, dtype=torch.float64)
    found = [quotient_mean(points, share, squared, max_evaluations=n) for n in (50, 70, 250)]
    assert [one.converged for one in found] == [False, False, True]
    early, later, end = (one.functional for one in found)
    assert early == later
    assert end[: len(early)] == early
    assert early[-1] < 1.005 * end[-1]
    assert gap(found[0].mean, found[1].mean) == 0


@pytest.mark.parametrize("evaluations", [50, 250])
def test_rounding_does_not_decide_where_it_ends(evaluations):
    """The same matrices from factors of condition 1e6, for adapters that share nothing."""
    generator = torch.Generator().manual_seed(12)
    points = adapters(128, 128, 8, 4, 0.0, seed=13)
    turned = []
    for x in points:
        left, right = x.pair()
        bad = random_orthogonal(generator, 8, 8) * torch.logspace(-3, 3, 8, dtype=torch.float64)
        bad = bad @ random_orthogonal(generator, 8, 8)
        turned.append(Polar.of_pair(left @ bad, torch.linalg.solve(bad, right)))
    share = torch.full((4,), 0.25, dtype=torch.float64)
    one, two = (
        quotient_mean(stack(p), share, squared, max_evaluations=evaluations).mean
        for p in (points, turned)
    )
    assert gap(two, one) < 1e-7


@pytest.mark.parametrize("size", [1e4, 1e200, math.inf])
@pytest.mark.parametrize("part", range(4))
def test_a_step_too_long_for_numbers_leads_nowhere(part, size):
    """No error from a decomposition, and no value that would count as lower."""
    share = torch.full((2,), 0.5, dtype=torch.float64)
    total = AlignedSum(stack(adapters(20, 20, 3, 2, 1.0, seed=15)), share, squared)
    place = total.at_point(Polar(*(x[0] for x in total.points)))
    step = Move(*(torch.zeros_like(x) for x in place.gradient))
    step[part][:] = size * torch.ones_like(step[part]).triu()
    new = total.moved(place, step, 1e-6)
    assert new is None or not new.found or math.isfinite(new.value)
    if size > 1e5 or part == 2:
        assert new is None or new.value == math.inf


def test_distances_at_a_converged_mean_are_known_to_be_short():
    """They are no shorter than angles and spectra allow: d² ≥ ‖θ_U‖² + ‖θ_V‖² + ‖Δ log λ‖²."""
    points = adapters(60, 50, 4, 4, 1.0, seed=14)
    found = low_rank_mean(points)
    assert found.converged
    x = found.mean
    for y, d in zip(points, found.distances, strict=True):
        cosines = [torch.linalg.svdvals(a.mT @ b) for a, b in ((x.u, y.u), (x.v, y.v))]
        angles = torch.cat(cosines).clamp(max=1).acos()
        spectra = torch.linalg.eigvalsh(x.b).log() - torch.linalg.eigvalsh(y.b).log()
        least = math.hypot(float(angles.norm()), float(spectra.norm()))
        assert least - 1e-9 <= float(d) <= 1.05 * least
