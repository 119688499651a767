"""Packing and connecting: outputs and norms along the way, and bounds that hold between grid points."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.errors import TwoLayerError
from isthmus.two_layer.certified import NetworkPath, certify
from isthmus.two_layer.connecting import connect, sufficient_width
from isthmus.two_layer.network import BALLS, Data, Network, norm
from isthmus.two_layer.packing import cone_count, groups, pack
from isthmus.two_layer.patterns import patterns
from isthmus.two_layer.pieces import Blend, Rescaling, line

from .solutions import random_data, solution


def along(piece, count=37):
    a, w = piece.at(np.sort(np.random.default_rng(0).uniform(size=count)))
    return [Network(*both) for both in zip(a, w, strict=True)]


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize(("n", "d"), [(3, 1), (4, 2), (4, 3)])
def test_packing_changes_no_output_and_leaves_no_ball(ball, n, d):
    data = random_data(n, n, d)
    if d == 1:
        data = Data(np.array([[1.0], [2.0], [-1.0]]), np.array([1.0, 2.0, -3.0]))
    found = patterns(data.points)
    network = solution(data, 40, seed=1)
    radius = norm(network, ball)
    packed = pack(network, data, found, ball, radius)
    for piece in packed.pieces:
        for other in along(piece):
            np.testing.assert_allclose(other.outputs(data.points), data.labels, atol=1e-9)
            assert norm(other, ball) <= radius * (1 + 1e-12)
    silent = np.ones(40, dtype=bool)
    silent[list(packed.carriers)] = False
    assert not packed.network.outer[silent].any()
    assert not packed.network.inner[silent].any()
    if ball != "max":
        assert len(packed.carriers) == len(groups(network, found)) <= 2 * found.seen


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize("seed", range(3))
def test_at_4p_every_pair_is_connected(ball, seed):
    data = random_data(seed, 4, 2)
    found = patterns(data.points)
    width = sufficient_width(found)
    assert width == 4 * 8 - 4 * (found.count - found.seen)
    ends = [solution(data, width, seed=10 * seed + k) for k in range(2)]
    radius = max(norm(end, ball) for end in ends)
    connection = connect(*ends, data, ball, found=found)
    assert connection.path is not None
    bound = connection.bound
    assert bound.joints == 0
    assert bound.loss < 1e-5
    assert radius <= bound.norm <= radius * (1 + 1e-3)
    pieces = connection.path.pieces
    for end, network in ((pieces[0].start, ends[0]), (pieces[-1].start, ends[1])):
        np.testing.assert_array_equal(end.outer, network.outer)
        np.testing.assert_array_equal(end.inner, network.inner)
    for piece in pieces:
        for other in along(piece):
            assert other.loss(data) <= bound.loss
            assert norm(other, ball) <= bound.norm
    finer = connect(*ends, data, ball, found=found, intervals=1024).bound
    assert finer.loss < bound.loss / 8


def test_narrow_networks_are_not_connected_by_the_construction():
    data = random_data(0, 4, 2)
    ends = [solution(data, 6, seed=k) for k in range(2)]
    connection = connect(*ends, data, "operator")
    assert sum(connection.needed) > connection.width == 6
    assert connection.path is connection.bound is None


def test_cancelling_neurons_are_moved_together_before_they_are_counted():
    # x = y = 1, R = 1: l + 1 neurons of +1, l of −1. Σ⌈‖v‖_∞/R²⌉ is the whole width 2l + 1.
    data = Data.of([[1.0]], [1.0])
    for less in (1, 4):
        network = Network.of([1.0] * (less + 1) + [-1.0] * less, np.ones((2 * less + 1, 1)))
        packed = pack(network, data, patterns(data.points), "max", 1.0)
        assert cone_count(network, patterns(data.points), 1.0) == 2 * less + 1
        assert packed.carriers == (0,)
        assert certify(NetworkPath(packed.pieces), data, "max").norm == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_linear_program_never_needs_more_than_the_cones(seed):
    data = random_data(seed, 4, 2)
    found = patterns(data.points)
    network = solution(data, 24, seed)
    radius = norm(network, "max")
    packed = pack(network, data, found, "max", radius)
    assert len(packed.carriers) <= cone_count(network, found, radius)
    # Independently: so many boxes hold the sums of their cones.
    sums = [network.products[mine].sum(axis=0) for mine in groups(network, found).values()]
    boxes = sum(int(np.ceil(np.abs(v).max() / radius**2 - 1e-9)) for v in sums)
    assert cone_count(network, found, radius) == boxes


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("intervals", [1, 3, 16])
def test_bounds_hold_between_grid_points_of_any_piece(seed, intervals):
    random = np.random.default_rng(seed)
    data = random_data(seed, 3, 2)
    one, other = (Network(random.normal(size=4), random.normal(size=(4, 2))) for _ in range(2))
    some = random.uniform(0, np.pi / 2, size=4) * (random.uniform(size=4) < 0.7)
    for piece in (line(one, other), Blend(one, other, some), Rescaling(one, random.normal(size=4))):
        for ball in BALLS:
            bound = certify(NetworkPath((piece,)), data, ball, intervals)
            assert max(net.loss(data) for net in along(piece, 400)) <= bound.loss
            assert max(norm(net, ball) for net in along(piece, 400)) <= bound.norm
    many = certify(NetworkPath((line(one, other),)), data, "max", 4096)
    assert many.loss == pytest.approx(many.grid_loss, rel=0.02)


def test_a_peak_between_grid_points_is_not_missed():
    # f = a·relu(w) with a and w swapping 0 and 1: 0 at the ends, ¼ half-way.
    swap = line(Network.of([1.0], [[0.0]]), Network.of([0.0], [[1.0]]))
    bound = certify(NetworkPath((swap,)), Data.of([[1.0]], [0.0]), "max", 1)
    assert bound.grid_loss == 0
    assert bound.loss >= 0.5 * 0.25**2


def test_jumps_are_reported():
    one, other = Network.of([1.0], [[1.0]]), Network.of([1.0], [[3.0]])
    path = NetworkPath((line(one, one), line(other, other)))
    assert path.joints == 2
    assert NetworkPath((line(one, one),), (line(other, other),)).joints == 2


def test_bad_input():
    data = random_data(0, 4, 2)
    found = patterns(data.points)
    network = solution(data, 8, seed=0)
    with pytest.raises(TwoLayerError, match="radius"):
        pack(network, data, found, "max", 0.1)
    with pytest.raises(TwoLayerError, match="one width"):
        connect(network, solution(data, 9, seed=0), data, "max")
    with pytest.raises(TwoLayerError, match="dimension"):
        groups(Network.of([1.0], [[1.0]]), found)
    with pytest.raises(TwoLayerError, match="not among"):
        groups(network, type(found)(found.points, found.active[:1], found.interiors[:1]))
    path = NetworkPath((line(network, network),))
    with pytest.raises(TwoLayerError, match="intervals"):
        certify(path, data, "max", 0)
    with pytest.raises(TwoLayerError, match="spectral"):
        certify(path, data, "spectral")
    with pytest.raises(TwoLayerError, match="dimension"):
        certify(path, random_data(0, 4, 3), "max")
