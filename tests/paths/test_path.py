"""Curves and paths: ends, coefficients, derivations by hand, refusals."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import comb

from isthmus.errors import PathError
from isthmus.paths.curves import Bezier, Linear, PolygonalChain, Spherical
from isthmus.paths.path import Path, check_grid, grid

from .points import Lazy, flat, model

CURVES = [Linear(), Spherical()] + [kind(n) for kind in (PolygonalChain, Bezier) for n in (1, 2, 5)]
BENT = CURVES[2:]


def bent(curve) -> Path:
    return Path(curve, [model(seed) for seed in range(curve.controls)])


@pytest.mark.parametrize("curve", CURVES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_ends_come_back_to_the_bit(curve, dtype):
    points = [model(seed, dtype) for seed in range(curve.controls)]
    path = Path(curve, points)
    for t, end in ((0, points[0]), (1, points[-1])):
        at = path.at(t)
        assert all(torch.equal(at[name].double(), end[name].double()) for name in ("w", "b"))


@given(t=st.floats(0, 1))
@pytest.mark.parametrize("curve", [curve for curve in CURVES if curve.controls > 2], ids=repr)
def test_coefficients_are_weights(curve, t):
    c = curve.coefficients(t)
    assert c.shape == (curve.controls,)
    assert (c >= 0).all()
    assert float(c.sum()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("t", [0.0, 0.2, 0.5, 0.9])
def test_bezier_is_de_casteljau(t):
    path = bent(Bezier(3))
    left = [flat(point) for point in path.points]
    while len(left) > 1:
        left = [(1 - t) * a + t * b for a, b in pairwise(left)]
    torch.testing.assert_close(flat(path.at(t)), left[0])
    assert float(Bezier(3).coefficients(t)[2]) == pytest.approx(comb(4, 2) * t**2 * (1 - t) ** 2)


def test_a_chain_goes_through_its_bends_in_straight_pieces():
    path = bent(PolygonalChain(2))
    for k, point in enumerate(path.points):
        torch.testing.assert_close(flat(path.at(k / 3)), flat(point))
    a, b = flat(path.points[1]), flat(path.points[2])
    torch.testing.assert_close(flat(path.at(0.4)), 0.8 * a + 0.2 * b)


@pytest.mark.parametrize("curve", BENT, ids=repr)
@pytest.mark.parametrize("t", [0.1, 0.5, 0.77])
def test_bends_begin_on_the_line(curve, t):
    a, b = model(0), model(1)
    straight = Path.straight(curve, a, b)
    line = Path(Linear(), (a, b)).at(t)
    torch.testing.assert_close(flat(straight.at(t)), flat(line))


def test_a_chain_with_its_bend_at_the_mean_is_the_line():
    a, b = model(0), model(1)
    mean = {name: (a[name] + b[name]) / 2 for name in ("w", "b")} | {"steps": a["steps"]}
    path, line = Path(PolygonalChain(), (a, mean, b)), Path(Linear(), (a, b))
    for t in grid(7):
        torch.testing.assert_close(flat(path.at(t)), flat(line.at(t)))


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 1.0])
def test_the_great_circle_keeps_norms_and_turns_evenly(t):
    a, b = model(0), model(1)
    b = {name: b[name] * (a[name].norm() / b[name].norm()) for name in ("w", "b")} | {
        "steps": b["steps"]
    }
    at = Path(Spherical(), (a, b)).at(t)
    for name in ("w", "b"):
        assert float(at[name].norm()) == pytest.approx(float(a[name].norm()), rel=1e-12)
        angle = math.acos(float((a[name] * b[name]).sum() / a[name].norm() ** 2))
        turned = float((a[name] * at[name]).sum() / a[name].norm() ** 2)
        assert turned == pytest.approx(math.cos(t * angle), abs=1e-9)


def test_a_vanishing_end_has_no_direction_and_stays_finite():
    a, b = model(0), model(1)
    b["b"] = torch.zeros(4, dtype=torch.float64)
    at = Path(Spherical(), (a, b)).at(0.5)
    assert torch.isfinite(at["b"]).all()


def test_numbers_are_mixed_wide_and_counters_are_the_first_models():
    points = [model(seed, torch.bfloat16) for seed in range(3)]
    at = Path(PolygonalChain(), points).at(0.3)
    assert at["w"].dtype == torch.float32
    expected = 0.4 * points[0]["w"].double() + 0.6 * points[1]["w"].double()
    torch.testing.assert_close(at["w"].double(), expected, rtol=1e-6, atol=1e-6)
    assert int(at["steps"]) == 0
    assert int(Path(Linear(), points[:2]).at(1)["steps"]) == 0


def test_only_what_is_needed_is_read():
    points = [Lazy(model(seed)) for seed in range(3)]
    path = Path(PolygonalChain(), points)
    assert not any(point.read for point in points)
    path.at(0.75, names=["w"])
    assert [point.read for point in points] == [[], ["w"], ["w"]]


def test_the_bends_have_the_gradients_of_finite_differences():
    path = bent(Bezier(2))

    def height(bend):
        points = (path.points[0], {**path.points[1], "w": bend}, *path.points[2:])
        return Path(Bezier(2), points).at(0.3)["w"].sin().sum()

    bend = path.points[1]["w"].clone().requires_grad_()
    assert torch.autograd.gradcheck(height, (bend,))


@pytest.mark.parametrize("t", [-0.01, 1.01, math.nan, math.inf])
def test_t_outside_is_refused(t):
    with pytest.raises(PathError, match="not on the path"):
        bent(Linear()).at(t)


@pytest.mark.parametrize("kind", [PolygonalChain, Bezier])
@pytest.mark.parametrize("bends", [0, -1])
def test_no_bends_are_refused(kind, bends):
    with pytest.raises(PathError, match="at least one bend"):
        kind(bends)


def test_other_numbers_of_points_are_refused():
    with pytest.raises(PathError, match="takes 3 control points, not 2"):
        Path(PolygonalChain(), [model(0), model(1)])


def test_other_names_are_refused():
    other = model(1)
    other["c"] = other.pop("b")
    with pytest.raises(PathError, match="Model 2 lacks 1 tensors, such as 'b'"):
        Path(Linear(), (model(0), other))
    with pytest.raises(PathError, match="has also 1 tensors, such as 'd'"):
        Path(Linear(), (model(0), {**model(1), "d": torch.ones(1)}))
    with pytest.raises(PathError, match="no tensors"):
        Path(Linear(), ({}, {}))


@pytest.mark.parametrize("curve", [Linear(), Spherical()], ids=repr)
def test_other_shapes_are_refused_by_name(curve):
    other = {**model(1), "b": torch.ones(1, dtype=torch.float64)}
    with pytest.raises(PathError, match=r"'b' has the shape \[4\] in one model and \[1\]"):
        Path(curve, (model(0), other)).at(0.5)


def test_unknown_tensors_are_refused():
    with pytest.raises(PathError, match="no tensor 'q'"):
        bent(Linear()).tensor(0.5, "q")


def test_grids():
    assert grid(5) == [0, 0.25, 0.5, 0.75, 1]
    with pytest.raises(PathError, match="grid of 2 points"):
        grid(2)


@pytest.mark.parametrize(
    "ts", [[], [0.0], [0.1, 1.0], [0.0, 0.9], [0.0, 0.5, 0.5, 1.0], [0.0, math.nan, 1.0]]
)
def test_grids_without_ends_or_order_are_refused(ts):
    with pytest.raises(PathError, match="begins with t = 0, rises, and ends with t = 1"):
        check_grid(ts)
