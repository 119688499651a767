"""Smallest balls against closed forms, a cone program, and random rescalings."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.errors import TwoLayerError
from isthmus.two_layer.network import BALLS, Data, Network, norm
from isthmus.two_layer.radius import minimal_radius


def drawn(seed, m, d):
    random = np.random.default_rng(seed)
    return Network.of(random.normal(size=m), random.normal(size=(m, d)))


@pytest.mark.parametrize("ball", BALLS)
@pytest.mark.parametrize(("m", "d"), [(1, 1), (2, 3), (6, 2), (5, 5), (20, 4)])
def test_the_balanced_network_is_the_same_function_and_no_rescaling_is_smaller(ball, m, d):
    network = drawn(m + d, m, d)
    found = minimal_radius(network, ball)
    points = np.random.default_rng(0).normal(size=(9, d))
    np.testing.assert_allclose(found.network.outputs(points), network.outputs(points), atol=1e-12)
    assert norm(found.network, ball) == pytest.approx(found.value, rel=1e-9)
    assert found.value == pytest.approx(found.lower, rel=1e-6)
    random = np.random.default_rng(1)
    for spread in (0.01, 0.1, 1.0):
        for _ in range(50):
            c = np.exp(spread * random.normal(size=m))
            other = Network(found.network.outer * c, found.network.inner / c[:, None])
            assert norm(other, ball) >= found.lower * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_operator_radius_of_a_cone_program(seed):
    import cvxpy as cp

    network = drawn(seed, 5, 3)
    moment = cp.Variable((3, 3), PSD=True)
    roots = [cp.sqrt(u @ moment @ u) for u in network.products]
    problem = cp.Problem(cp.Maximize(cp.sum(cp.hstack(roots))), [cp.trace(moment) == 1])
    best = problem.solve(solver=cp.CLARABEL)
    assert minimal_radius(network, "operator").value ** 2 == pytest.approx(best, rel=1e-5)


def test_silent_neurons_become_zero_and_nothing_is_a_point():
    network = Network.of([0.0, 1.0, 2.0], [[5.0, 5.0], [0.0, 0.0], [1.0, 0.0]])
    for ball in BALLS:
        assert not minimal_radius(network, ball).network.inner[:2].any()
    nothing = Network.of([0.0], [[3.0]])
    assert [minimal_radius(nothing, ball).value for ball in BALLS] == [0, 0, 0, 0]


def test_bad_networks_data_and_balls():
    with pytest.raises(TwoLayerError, match="axis 0"):
        Network.of([1.0, 2.0], [[1.0]])
    with pytest.raises(TwoLayerError, match="NaN"):
        Network.of([np.inf], [[1.0]])
    with pytest.raises(TwoLayerError, match="3 points"):
        Data.of(np.ones((3, 2)), [1.0])
    with pytest.raises(TwoLayerError, match="spectral"):
        minimal_radius(drawn(0, 2, 2), "spectral")
    with pytest.raises(TwoLayerError, match="spectral"):
        norm(drawn(0, 2, 2), "spectral")
