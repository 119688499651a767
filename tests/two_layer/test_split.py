"""The two-neuron data set: components, radii, and the proof that they are apart."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import minimize

from isthmus.errors import TwoLayerError
from isthmus.two_layer.network import BALLS, Data, Network
from isthmus.two_layer.split import (
    cell_of,
    checked_radii,
    component_of,
    components,
    two_neuron_data,
    window,
)
from isthmus.two_layer.walls import split_certificate


@pytest.fixture
def data():
    return two_neuron_data()


def test_points_and_components(data):
    np.testing.assert_allclose(data.points[0], [5 / 6, 1 / 6])
    np.testing.assert_allclose(data.points[2], [-5 / 6, 11 / 6])
    found = components(data)
    for component, product in zip(found, [(1, 1), (-1, -1), (1.2, 0), (-1.2, 0)], strict=True):
        np.testing.assert_allclose(component.product, product, atol=1e-14)
        assert component.network.loss(data) < 1e-28
        assert cell_of(component.network, data) == component.cell
        assert component_of(component.network, data).cell == component.cell


def test_minimisation_from_everywhere_finds_these_four_and_no_other(data):
    random = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        solved = minimize(
            lambda x: Network(x[:2], x[2:].reshape(2, 2)).loss(data),
            random.normal(size=6),
            method="BFGS",
        )
        network = Network(solved.x[:2], solved.x[2:].reshape(2, 2))
        if solved.fun < 1e-9:
            component = component_of(network, data)
            seen.add(component.cell)
            np.testing.assert_allclose(network.products[0], component.product, atol=1e-3)
    assert seen == {component.cell for component in components(data)}


@pytest.mark.parametrize("ball", BALLS)
def test_radii_in_closed_form_are_those_of_balancing(data, ball):
    for closed, found in checked_radii(data, ball).values():
        assert closed == pytest.approx(found, rel=1e-8)


def test_windows(data):
    adamw, muon = window(data, "max"), window(data, "operator")
    assert (adamw.kind, adamw.low, adamw.high) == ("same", 1, pytest.approx(np.sqrt(1.2)))
    assert (muon.kind, muon.low, muon.high) == (
        "opposite",
        pytest.approx(1.5492, abs=1e-4),
        pytest.approx(1.6818, abs=1e-4),
    )
    joint = window(data, "joint")
    assert (joint.low, joint.high) == (
        pytest.approx(2.191, abs=1e-3),
        pytest.approx(2.378, abs=1e-3),
    )
    assert window(two_neuron_data([1, 0], [0, 1]), "max") is None


def test_certificate(data):
    certificate = split_certificate(data)
    assert certificate.verify()
    assert certificate.barrier == Fraction(1, 2)
    assert (len(certificate.cells), len(certificate.faces)) == (64, 128)
    # Above the level one half the walls between solutions open; cells of equal neurons lie behind walls of 1.
    assert len(set(certificate.parts(Fraction(1, 2)).values())) == 16
    opened = certificate.parts(Fraction(51, 100))
    assert len({opened[component.cell] for component in components(data)}) == 1
    assert len(set(opened.values())) == 5
    assert len(set(certificate.parts(Fraction(101, 100)).values())) == 1


def test_tampered_certificates_do_not_verify(data):
    good = split_certificate(data)
    assert not replace(good, barrier=Fraction(2, 3)).verify()
    assert not replace(good, faces=good.faces[1:]).verify()
    assert not replace(good, faces=good.faces[1:] + good.faces[1:2]).verify()
    low = replace(good.faces[0], value=Fraction(0))
    assert not replace(good, faces=(low, *good.faces[1:])).verify()
    negative = replace(good.faces[0], primal=tuple(-x for x in good.faces[0].primal))
    assert not negative.verify()
    infeasible = replace(good.faces[0], dual=(Fraction(1),) * 4)
    assert not infeasible.verify()


@pytest.mark.parametrize("wall", range(4))
def test_no_optimiser_gets_below_one_half_on_a_wall(data, wall):
    neuron, point = divmod(wall, 2)
    x = data.points[2 * point]
    along = np.array([-x[1], x[0]])
    random = np.random.default_rng(wall)

    def on_wall(values):
        inner = np.zeros((2, 2))
        inner[neuron], inner[1 - neuron] = values[2] * along, values[3:]
        return Network(values[:2], inner)

    found = [
        minimize(lambda v: on_wall(v).loss(data), random.normal(size=5), method="Nelder-Mead").fun
        for _ in range(30)
    ]
    assert min(found) >= 0.5 - 1e-12
    assert min(found) == pytest.approx(0.5, abs=1e-4)


def test_networks_of_high_loss_belong_nowhere(data):
    assert component_of(Network.of([1, 1], [[1, 0], [0, 1]]), data) is None
    with pytest.raises(TwoLayerError, match="above 1/2"):
        component_of(components(data)[0].network, data, below=0.6)


def test_bad_data(data):
    with pytest.raises(TwoLayerError, match="labels 1"):
        components(Data.of(data.points, [1, 1, 1, 2]))
    with pytest.raises(TwoLayerError, match="parallel"):
        two_neuron_data([1, 1], [2, 2])
    with pytest.raises(TwoLayerError, match="parallel"):
        split_certificate(Data.of([[1, 0], [-1, 0], [2, 0], [-2, 0]], np.ones(4)))
    with pytest.raises(TwoLayerError, match="two numbers"):
        two_neuron_data([1, 1, 1], [2, 2])
    with pytest.raises(TwoLayerError, match="3 neurons"):
        cell_of(Network.of(np.ones(3), np.ones((3, 2))), data)
    with pytest.raises(TwoLayerError, match="spectral"):
        components(data)[0].radius("spectral")
