"""A curve in weight space: a model for every t from 0 to 1."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from torch import Tensor

from isthmus.errors import PathError
from isthmus.paths.curves import Curve, Linear
from isthmus.paths.mixing import Parameters, check_names


class Path:
    """A curve with its control points.

    Tensors that hold no floating-point numbers, such as counters and masks, are the first point's
    everywhere.

    Args:
        curve: Its shape.
        points: The control points: the models at both ends, and between them the bends. Mappings that
            read tensors when they are asked for stay so.

    Raises:
        PathError: Another number of points than the curve takes, or points with other names.
    """

    def __init__(self, curve: Curve, points: Sequence[Parameters]) -> None:
        if len(points) != curve.controls:
            raise PathError(
                f"{curve!r} takes {curve.controls} control points, not {len(points)}",
                "Give both ends and every bend, in their order.",
            )
        check_names(points)
        self.curve = curve
        self.points = tuple(points)

    @classmethod
    def straight(cls, curve: Curve, a: Parameters, b: Parameters) -> Path:
        """The path whose bends lie evenly on the line from a to b, where their training begins.

        Raises:
            PathError: a and b have other names or shapes.
        """
        line = cls(Linear(), (a, b))
        pieces = curve.controls - 1
        return cls(curve, (a, *(line.at(k / pieces) for k in range(1, pieces)), b))

    @property
    def bends(self) -> tuple[Parameters, ...]:
        """The control points between the ends."""
        return self.points[1:-1]

    def at(self, t: float, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The model at t, in float32 at least; differentiable in its control points.

        Args:
            t: 0 gives the first point and 1 the last, number for number.
            names: Which tensors; all of them if None.

        Raises:
            PathError: t outside [0, 1], or points of different shapes.
        """
        return {name: self.tensor(t, name) for name in (self.points[0] if names is None else names)}

    def tensor(self, t: float, name: str) -> Tensor:
        """One tensor of the model at t; see `at`.

        Raises:
            PathError: t outside [0, 1], an unknown name, or points of different shapes.
        """
        check_t(t)
        if name not in self.points[0]:
            raise PathError(
                f"The models have no tensor {name!r}",
                f"They have, among others, {next(iter(self.points[0]))!r}.",
            )
        return self.curve.tensor(t, self.points, name)


def check_t(t: float) -> None:
    """See that t is a place on a path.

    Raises:
        PathError: It lies outside [0, 1], or is NaN.
    """
    if not 0 <= t <= 1:
        raise PathError(
            f"t = {t} is not on the path", "t runs from 0, the first model, to 1, the last."
        )


def grid(points: int = 25) -> list[float]:
    """Evenly spaced t from 0 to 1, both included.

    Raises:
        PathError: Fewer than three points, which see nothing between the ends.
    """
    if points < 3:
        raise PathError(
            f"A grid of {points} points sees nothing between the ends", "Take 3 points or more."
        )
    return [k / (points - 1) for k in range(points)]


def check_grid(ts: Sequence[float]) -> None:
    """See that a grid can show a barrier.

    Raises:
        PathError: It does not rise, or lacks an end.
    """
    rises = all(math.isfinite(t) for t in ts) and all(one < other for one, other in pairwise(ts))
    if len(ts) < 2 or not rises or ts[0] != 0 or ts[-1] != 1:
        raise PathError(
            "A grid begins with t = 0, rises, and ends with t = 1: barriers compare with both ends",
            "Take grid(25), or add the ends to your own values.",
        )
