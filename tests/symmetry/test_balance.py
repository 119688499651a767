"""Representatives of least norm."""

import warnings

import pytest
import torch
from scipy.optimize import minimize

from isthmus.geometry.manifold import GeometryWarning
from isthmus.symmetry.balance import balance
from isthmus.symmetry.matrix_groups import GeneralLinear
from isthmus.symmetry.monomial import Monomial
from isthmus.symmetry.spec import FREE, Spec, on
from tests.symmetry.networks import decoder, distance, drawn, mlp, run_mlp, seeded


def squares(tensors):
    return sum(float(x.square().sum()) for x in tensors.values())


NETWORKS = {"mlp": mlp(5, 7, 6, 4, 3), "decoder": decoder("orthogonal")}
networks = pytest.mark.parametrize(("spec", "shapes"), NETWORKS.values(), ids=NETWORKS)


@networks
def test_no_element_gives_a_smaller_norm(spec, shapes):
    generator = seeded(0)
    tensors = drawn(shapes, generator)
    found = balance(spec, tensors)
    least = squares(found.parameters)
    assert found.converged
    assert least < squares(tensors)
    for _ in range(30):
        assert squares(spec.act(spec.random(generator), tensors)) >= least


@networks
def test_every_network_of_an_orbit_has_the_same_least_norm(spec, shapes):
    generator = seeded(1)
    tensors = drawn(shapes, generator)
    moved = spec.act(spec.random(generator), tensors)
    first, second = balance(spec, tensors), balance(spec, moved)
    assert squares(second.parameters) == pytest.approx(squares(first.parameters), rel=1e-9)


@networks
def test_balancing_twice_changes_nothing(spec, shapes):
    once = balance(spec, drawn(shapes, seeded(2))).parameters
    twice = balance(spec, once).parameters
    assert distance(once, twice) < 1e-7


def test_coupled_scales_reach_the_minimum_that_scipy_finds():
    spec, shapes = mlp(3, 4, 3, 2)
    tensors = drawn(shapes, seeded(3))

    def value_and_slope(logs):
        x = torch.from_numpy(logs).requires_grad_()
        scales = {"h0": x[:4].exp(), "h1": x[4:].exp()}
        total = (tensors["0.weight"] * scales["h0"][:, None]).square().sum()
        total = total + (tensors["0.bias"] * scales["h0"]).square().sum()
        middle = tensors["1.weight"] * scales["h1"][:, None] / scales["h0"]
        total = total + middle.square().sum() + (tensors["1.bias"] * scales["h1"]).square().sum()
        total = total + (tensors["2.weight"] / scales["h1"]).square().sum()
        total = total + tensors["2.bias"].square().sum()
        total.backward()
        return total.item(), x.grad.numpy()

    start = torch.zeros(7, dtype=torch.float64).numpy()
    least = minimize(value_and_slope, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-14})
    assert squares(balance(spec, tensors).parameters) == pytest.approx(least.fun, rel=1e-9)


def test_the_function_stays():
    spec, shapes = mlp(5, 7, 6, 3)
    tensors = drawn(shapes, seeded(4))
    x = torch.randn(20, 5, generator=seeded(5), dtype=torch.float64)
    torch.testing.assert_close(run_mlp(balance(spec, tensors).parameters, x), run_mlp(tensors, x))


def test_one_tensor_with_an_axis_on_both_dimensions():
    """Vectors and duals of one axis in one tensor: not one step, but several."""
    spec = Spec({"h": Monomial(4, "nonzero")}, {"w": (on("h"), on("h", "dual"))})
    tensors = drawn({"w": (4, 4)}, seeded(6))
    w = balance(spec, tensors).parameters["w"]
    torch.testing.assert_close(w.square().sum(0), w.square().sum(1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(w.diagonal(), tensors["w"].diagonal())


def test_dead_units_and_short_grams_give_no_nan():
    spec, shapes = mlp(4, 6, 3)
    tensors = drawn(shapes, seeded(7))
    tensors["0.weight"][2], tensors["0.bias"][2], tensors["1.weight"][:, 4] = 0, 0, 0
    assert all(x.isfinite().all() for x in balance(spec, tensors).parameters.values())
    value = {"v": (on("g"), FREE), "o": (FREE, on("g", "dual"))}
    short = Spec({"g": GeneralLinear(5)}, value)
    tensors = drawn({"v": (5, 2), "o": (3, 5)}, seeded(8))
    balanced = balance(short, tensors).parameters
    torch.testing.assert_close(
        balanced["o"] @ balanced["v"], tensors["o"] @ tensors["v"], rtol=1e-6, atol=1e-6
    )


def test_too_few_sweeps_warn():
    spec, shapes = mlp(5, 7, 6, 4, 3)
    tensors = drawn(shapes, seeded(9))
    with pytest.warns(GeometryWarning, match="did not converge: the axis"):
        found = balance(spec, tensors, sweeps=1)
    assert not found.converged
    assert found.residual > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert balance(spec, tensors).residual == 0
