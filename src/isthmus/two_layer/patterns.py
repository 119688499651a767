"""The activation patterns of a data set: which points a neuron can be active on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import linprog

from isthmus.errors import TwoLayerError
from isthmus.two_layer.network import Floats, finite

_MARGIN = 1e-9
"""Cones whose widest interior margin is smaller are taken for empty; `Patterns.verify` finds out."""


@dataclass(frozen=True, eq=False)
class Patterns:
    """All chambers of the arrangement of the hyperplanes {w : x_k·w = 0}.

    Attributes:
        points: X, shape [n, d].
        active: Shape [P, n]; whether x_k·w > 0 in the chamber. Rows are sorted.
        interiors: Shape [P, d]; a w inside each.
    """

    points: Floats
    active: NDArray[np.bool_]
    interiors: Floats

    @property
    def count(self) -> int:
        """P."""
        return len(self.active)

    @cached_property
    def seen(self) -> int:
        """Patterns that are active on a point at least."""
        return int(self.active.any(axis=1).sum())

    def verify(self) -> bool:
        """Whether these are all patterns, and each is one: decided in rational arithmetic.

        Every interior point is tested with the exact values of the floats; the number of distinct patterns is
        compared with that of chambers by deletion and restriction. Takes time in proportion to P·n·d.
        """
        rows = [[Fraction(float(x)) for x in row] for row in self.points]
        nonzero = [any(row) for row in rows]
        for pattern, interior in zip(self.active, self.interiors, strict=True):
            w = [Fraction(float(value)) for value in interior]
            for row, active, counts in zip(rows, pattern, nonzero, strict=True):
                side = sum(x * value for x, value in zip(row, w, strict=True))
                if counts and (side == 0 or (side > 0) != active):
                    return False
                if not counts and active:
                    return False
        return len(set(map(bytes, self.active))) == self.count == chambers(self.points)


def patterns(points: ArrayLike) -> Patterns:
    """Enumerate the patterns of a small data set.

    Hyperplanes are added one after the other; a linear program says whether one cuts a chamber, and gives a
    point inside each part. In the plane the chambers are arcs between sorted angles.

    Args:
        points: Shape [n, d]. A zero point is active in no pattern.

    Raises:
        TwoLayerError: other shapes, NaN or infinity.
    """
    x = finite("points", points, 2)
    lengths = np.linalg.norm(x, axis=1)
    rows = x[lengths > 0] / lengths[lengths > 0, None]
    inside = _arcs(rows) if x.shape[1] == 2 and len(rows) else _chambers(rows, x.shape[1])
    active = x @ inside.T > 0
    order = np.lexsort(active[::-1])
    return Patterns(x, active.T[order], inside[order])


def cover_count(n: int, d: int) -> int:
    """2·Σ_{k<d} C(n − 1, k): chambers of n hyperplanes in general position (Cover 1965, the function-counting theorem).

    Args:
        n: Points, at least one.
        d: Dimension, at least one.
    """
    return 2 * sum(comb(n - 1, k) for k in range(d))


def chambers(points: ArrayLike) -> int:
    """The exact number of chambers, for points in any position.

    By deletion and restriction, r(A) = r(A − H) + r(A restricted to H), in rational arithmetic on the exact
    values of the floats (Zaslavsky 1975).

    Args:
        points: Shape [n, d].

    Raises:
        TwoLayerError: other shapes, NaN or infinity.
    """
    rows = [tuple(Fraction(float(value)) for value in row) for row in finite("points", points, 2)]
    return _count(_distinct(rows))


Row = tuple[Fraction, ...]


def _distinct(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Without zero rows, and one of each line."""
    found: dict[Row, None] = {}
    for row in rows:
        leading = next((value for value in row if value), None)
        if leading is not None:
            found[tuple(value / leading for value in row)] = None
    return tuple(found)


def _count(rows: tuple[Row, ...]) -> int:
    if not rows:
        return 1
    if len(rows[0]) == 2 or len(rows) == 1:
        return 2 * len(rows)
    *rest, last = rows
    # On {last·w = 0} one coordinate is a function of the others.
    at = next(k for k, value in enumerate(last) if value)
    others = [k for k in range(len(last)) if k != at]
    restricted = [tuple(row[k] - row[at] * last[k] / last[at] for k in others) for row in rest]
    return _count(tuple(rest)) + _count(_distinct(restricted))


def _arcs(rows: Floats) -> Floats:
    """A vector inside each arc between lines through the origin, shape [P, 2]."""
    normals = np.arctan2(rows[:, 1], rows[:, 0])
    edges = np.sort((normals + np.pi / 2) % np.pi)
    apart = np.diff(edges, append=edges[0] + np.pi)
    # Two floats of one line may differ by rounding.
    wide = apart > _MARGIN
    middles = edges[wide] + apart[wide] / 2
    angles = np.concatenate([middles, middles + np.pi])
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _chambers(rows: Floats, dimension: int) -> Floats:
    signs: list[tuple[int, ...]] = [()]
    inside: list[Floats] = [np.zeros(dimension)]
    for k in range(len(rows)):
        further: list[tuple[int, ...]] = []
        found: list[Floats] = []
        for sign in signs:
            for side in (1, -1):
                point = _interior(rows[: k + 1], np.array([*sign, side], dtype=np.float64))
                if point is not None:
                    further.append((*sign, side))
                    found.append(point)
        signs, inside = further, found
    return np.array(inside)


def _interior(rows: Floats, signs: Floats) -> Floats | None:
    """The w of ‖w‖_∞ ≤ 1 with the largest margin, or None where the chamber is empty."""
    count, dimension = rows.shape
    constraints = np.concatenate([-signs[:, None] * rows, np.ones((count, 1))], axis=1)
    solved = linprog(
        [0.0] * dimension + [-1.0],
        A_ub=constraints,
        b_ub=np.zeros(count),
        bounds=[(-1, 1)] * dimension + [(None, 1)],
        method="highs",
    )
    if solved.status != 0:
        raise TwoLayerError(
            f"the linear program of a pattern was not solved: {solved.message}",
            "scale the points to lengths of about 1",
        )
    return np.asarray(solved.x[:-1]) if solved.x[-1] > _MARGIN else None
