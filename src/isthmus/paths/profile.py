"""What a model does at every point of a path."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from isthmus.errors import PathError
from isthmus.paths.barriers import Barrier, Kind, barrier
from isthmus.paths.mixing import Parameters
from isthmus.paths.path import Path, check_grid

Evaluate = Callable[[Parameters], Mapping[str, float]]
"""Figures of a model by name, such as loss and accuracy, over a whole evaluation set."""

Prepare = Callable[[float, Parameters], Parameters]
"""What happens to the model at t before it is evaluated, such as new statistics for BatchNorm."""


@dataclass(frozen=True)
class Profile:
    """Figures along a path.

    Attributes:
        ts: The grid, from 0 to 1.
        values: By name, a figure for every t.
    """

    ts: tuple[float, ...]
    values: Mapping[str, tuple[float, ...]]

    def barrier(self, kind: Kind = "b", name: str = "loss") -> Barrier:
        """The barrier of one of the figures, a loss; see `barrier`.

        Raises:
            PathError: There is no such figure, or no point between the ends.
        """
        if name not in self.values:
            raise PathError(
                f"There is no figure {name!r} along the path",
                f"There are: {', '.join(self.values)}.",
            )
        return barrier(self.values[name], self.ts, kind)


def profile(
    path: Path,
    evaluate: Evaluate,
    ts: Sequence[float],
    *,
    prepare: Prepare | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Profile:
    """Evaluate the models on a grid; one is in memory at a time.

    Args:
        path: Where they lie.
        evaluate: Gives the figures of one.
        ts: The grid; it has both ends, so that barriers are measured against them.
        prepare: Applied to every model first, the ends included.
        progress: Told after every point how many are done, of how many.

    Raises:
        PathError: A grid that lacks an end, or a figure that is not finite.
    """
    check_grid(ts)
    rows: list[dict[str, float]] = []
    for number, t in enumerate(ts, start=1):
        point: Parameters = path.at(t)
        if prepare is not None:
            point = prepare(t, point)
        rows.append(finite(evaluate(point), f"at t = {t:g}"))
        if progress is not None:
            progress(number, len(ts))
    return Profile(tuple(ts), {name: tuple(row[name] for row in rows) for name in rows[0]})


def finite(figures: Mapping[str, float], where: str) -> dict[str, float]:
    """The figures, if all of them are numbers.

    Raises:
        PathError: One is NaN or infinite.
    """
    for name, value in figures.items():
        if not math.isfinite(value):
            raise PathError(
                f"The {name} {where} is {value}",
                "See that the models and the data are finite, and run the network in float32.",
            )
    return dict(figures)
