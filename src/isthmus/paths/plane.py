"""The plane through three models, and a landscape on it (Garipov et al. 2018, arXiv 1802.10026)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.errors import PathError
from isthmus.paths.mixing import Parameters, check_names, mixed, same_shape
from isthmus.paths.profile import Evaluate, finite

_COLLINEAR = 1e-6
"""Sine of the angle at the first model below which three models lie on a line."""


class Coordinates(NamedTuple):
    """Of a model with respect to a plane.

    Attributes:
        x: Along the line from the first model to the second.
        y: Across it, positive on the third model's side.
        distance: From the plane.
    """

    x: float
    y: float
    distance: float


class Plane:
    """The plane through a, b and c in orthonormal coordinates: a in the origin, b on the positive x-axis, y(c) > 0.

    Lengths are Euclidean over all floating-point tensors, accumulated in float64; the statistics of
    BatchNorm count if they are among them.

    Args:
        a: A model.
        b: Another.
        c: A third.

    Attributes:
        corners: Coordinates (x, y) of a, b and c.

    Raises:
        PathError: Other names or shapes, or three models on a line, two equal ones included.
    """

    def __init__(self, a: Parameters, b: Parameters, c: Parameters) -> None:
        self._points = (a, b, c)
        check_names(self._points)
        bb, bc, cc = self._products((b, b), (b, c), (c, c))
        self._base = math.sqrt(bb)
        self._x = bc / self._base if bb else 0.0
        # ‖c − a‖² − x² would lose half of the digits where the three are nearly on a line.
        self._y = self._height(bc / bb) if bb else 0.0
        if not self._y > _COLLINEAR * math.sqrt(cc):
            raise PathError(
                "The three models lie on a line, which is in no single plane",
                "Take a third model off the line between the first two, such as a trained bend.",
            )
        self.corners = ((0.0, 0.0), (self._base, 0.0), (self._x, self._y))

    def at(self, x: float, y: float) -> dict[str, Tensor]:
        """The model at (x, y); a, b and c themselves at their corners."""
        third = y / self._y
        second = (x - third * self._x) / self._base
        weights = (1 - second - third, second, third)
        return {name: mixed(weights, self._points, name) for name in self._points[0]}

    def coordinates(self, point: Parameters) -> Coordinates:
        """Where a model's nearest point in the plane lies, and how far away that is.

        Raises:
            PathError: It has other names or shapes.
        """
        _, b, c = self._points
        check_names((self._points[0], point))
        pb, pc, pp = self._products((point, b), (point, c), (point, point))
        x = pb / self._base
        y = (pc - x * self._x) / self._y
        return Coordinates(x, y, math.sqrt(max(pp - x**2 - y**2, 0.0)))

    def _height(self, ratio: float) -> float:
        """‖(c − a) − ratio (b − a)‖."""
        a, b, c = self._points
        total = 0.0
        for name in a:
            origin = a[name]
            if origin.is_floating_point():
                start = origin.detach().double()
                off = c[name].detach().double() - start
                off -= ratio * (b[name].detach().double() - start)
                total += float(off.square().sum())
        return math.sqrt(total)

    def _products(self, *pairs: tuple[Parameters, Parameters]) -> list[float]:
        """⟨p − a, q − a⟩ for pairs (p, q), a tensor at a time."""
        a = self._points[0]
        totals = [0.0] * len(pairs)
        for name in a:
            origin = a[name]
            if not origin.is_floating_point():
                continue
            start = origin.detach().double()
            for number, (p, q) in enumerate(pairs):
                left, right = p[name], q[name]
                same_shape(name, origin, left)
                same_shape(name, origin, right)
                product = (left.detach().double() - start) * (right.detach().double() - start)
                totals[number] += float(product.sum())
        return totals


@dataclass(frozen=True)
class Landscape:
    """Figures on a grid of a plane.

    Attributes:
        xs: Shape [X].
        ys: Shape [Y].
        values: By name, shape [Y, X].
    """

    xs: Tensor
    ys: Tensor
    values: Mapping[str, Tensor]


def frame(plane: Plane, points: int = 11, margin: float = 0.2) -> tuple[list[float], list[float]]:
    """Evenly spaced xs and ys around the corners of a plane.

    Args:
        plane: The plane.
        points: How many along each side.
        margin: How far beyond the corners, as a share of the width and of the height.

    Raises:
        PathError: Fewer than two points.
    """
    if points < 2:
        raise PathError(f"A grid of {points} points a side has no area", "Take 2 or more.")
    sides = []
    for numbers in zip(*plane.corners, strict=True):
        low, high = min(numbers), max(numbers)
        room = margin * (high - low)
        step = (high - low + 2 * room) / (points - 1)
        sides.append([low - room + k * step for k in range(points)])
    return sides[0], sides[1]


def landscape(
    plane: Plane,
    evaluate: Evaluate,
    xs: Sequence[float],
    ys: Sequence[float],
    *,
    prepare: Callable[[Parameters], Parameters] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Landscape:
    """Evaluate the models on a grid of a plane; one is in memory at a time.

    Args:
        plane: The plane.
        evaluate: Gives the figures of a model.
        xs: The grid's xs; see `frame`.
        ys: The grid's ys.
        prepare: Applied to every model first, such as new statistics for BatchNorm.
        progress: Told after every point how many are done, of how many.

    Raises:
        PathError: An empty grid, or a figure that is not finite.
    """
    if not xs or not ys:
        raise PathError("The grid on the plane is empty", "Give xs and ys; see `frame`.")
    rows: list[dict[str, float]] = []
    for y in ys:
        for x in xs:
            point: Parameters = plane.at(x, y)
            if prepare is not None:
                point = prepare(point)
            rows.append(finite(evaluate(point), f"at x = {x:.4g}, y = {y:.4g}"))
            if progress is not None:
                progress(len(rows), len(xs) * len(ys))
    values = {
        name: torch.tensor([row[name] for row in rows], dtype=torch.float64).reshape(len(ys), -1)
        for name in rows[0]
    }
    across, up = (torch.tensor(list(side), dtype=torch.float64) for side in (xs, ys))
    return Landscape(across, up, values)
