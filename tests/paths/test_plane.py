"""The plane through three models: isometry, corners to the bit, refusals."""

from __future__ import annotations

import math

import pytest
import torch

from isthmus.errors import PathError
from isthmus.paths.plane import Plane, frame, landscape

from .points import flat, model


@pytest.fixture
def plane():
    return Plane(model(0), model(1), model(2))


def test_corners_are_the_models_to_the_bit(plane):
    for seed, corner in enumerate(plane.corners):
        at = plane.at(*corner)
        assert torch.equal(flat(at), flat(model(seed)))
        assert int(at["steps"]) == 0


def test_coordinates_are_orthonormal(plane):
    places = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (-0.7, 2.3)]
    points = [flat(plane.at(*place)) for place in places]
    for one, p in zip(places, points, strict=True):
        for other, q in zip(places, points, strict=True):
            assert float((p - q).norm()) == pytest.approx(math.dist(one, other), abs=1e-12)
    assert plane.corners[1][0] == pytest.approx(float((flat(model(1)) - flat(model(0))).norm()))
    assert plane.corners[2][1] > 0


def test_coordinates_come_back(plane):
    for place in [(0.0, 0.0), (0.3, -1.2), *plane.corners]:
        found = plane.coordinates(plane.at(*place))
        assert found[:2] == pytest.approx(place, abs=1e-12)
        assert found.distance == pytest.approx(0, abs=1e-6)


def test_a_model_off_the_plane_has_its_nearest_point_and_distance(plane):
    p = flat(model(3))
    found = plane.coordinates(model(3))
    foot = flat(plane.at(found.x, found.y))
    a = flat(model(0))
    for seed in (1, 2):
        assert float((p - foot) @ (flat(model(seed)) - a)) == pytest.approx(0, abs=1e-10)
    assert found.distance == pytest.approx(float((p - foot).norm()))


def test_a_landscape_of_squared_lengths(plane):
    a = flat(model(0))
    xs, ys = frame(plane, points=5)
    seen = []
    found = landscape(
        plane,
        lambda point: {"loss": float((flat(point) - a).square().sum())},
        xs,
        ys,
        progress=lambda done, total: seen.append((done, total)),
    )
    expected = found.ys[:, None] ** 2 + found.xs[None, :] ** 2
    torch.testing.assert_close(found.values["loss"], expected)
    assert seen[-1] == (25, 25)
    for number in (0, 1):
        side = [corner[number] for corner in plane.corners]
        values = (xs, ys)[number]
        room = 0.2 * (max(side) - min(side))
        assert values[0] == pytest.approx(min(side) - room)
        assert values[-1] == pytest.approx(max(side) + room)


def test_models_are_prepared(plane):
    found = landscape(
        plane,
        lambda point: {"loss": float(point["b"].sum())},
        [0.0, 1.0],
        [0.0],
        prepare=lambda point: {**point, "b": torch.ones(4)},
    )
    assert found.values["loss"].tolist() == [[4, 4]]


def test_models_on_a_line_are_refused():
    a, b = model(0), model(1)
    line = {name: a[name] + 3 * (b[name] - a[name]) for name in ("w", "b")} | {"steps": a["steps"]}
    for three in [(a, b, line), (a, a, b), (a, b, a), (a, b, b), (a, a, a)]:
        with pytest.raises(PathError, match="lie on a line"):
            Plane(*three)


def test_other_models_are_refused(plane):
    with pytest.raises(PathError, match="lacks"):
        Plane(model(0), model(1), {"w": model(2)["w"]})
    with pytest.raises(PathError, match="'b' has the shape"):
        plane.coordinates({**model(3), "b": torch.ones(1)})
    with pytest.raises(PathError, match="no area"):
        frame(plane, points=1)
    with pytest.raises(PathError, match="empty"):
        landscape(plane, lambda _: {"loss": 0.0}, [], [1.0])
    with pytest.raises(PathError, match=r"The loss at x = 0, y = 1 is nan"):
        landscape(plane, lambda _: {"loss": math.nan}, [0.0], [1.0])
