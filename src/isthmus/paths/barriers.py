"""How much the loss rises between two models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from isthmus.errors import PathError
from isthmus.paths.path import check_grid

Kind = Literal["a", "b"]


@dataclass(frozen=True)
class Barrier:
    """The largest excess of the loss over what its ends let expect.

    Attributes:
        value: The largest excess on the grid, ends included. Of kind (b) it is 0 at least, as both ends have
            the excess 0; of kind (a) it is half the difference of the ends at least.
        at: The t where it lies, the first of several.
        kind: Which definition; see `barrier`.
        ts: The grid.
        excess: The excess at every t of the grid.
    """

    value: float
    at: float
    kind: Kind
    ts: tuple[float, ...]
    excess: tuple[float, ...]

    @property
    def interior(self) -> float:
        """The largest excess strictly between the ends: below 0 where all of the path beats its ends."""
        return max(self.excess[1:-1])

    @property
    def lowest(self) -> float:
        """The smallest excess on the grid: below 0 where some of the path beats its ends."""
        return min(self.excess)


def barrier(losses: Sequence[float], ts: Sequence[float], kind: Kind = "b") -> Barrier:
    """The barrier of a loss on a grid, by one of the two definitions in use.

    (a) max L(t) − ½(L(0) + L(1)), as Frankle et al. 2020 (arXiv 1912.05671) do;
    (b) max [L(t) − ((1−t)L(0) + tL(1))], as Entezari et al. 2022 (arXiv 2110.06296) and P3
    (arXiv 2605.09991) do. They differ where the ends do.

    Args:
        losses: L on the grid.
        ts: The grid, from 0 to 1.
        kind: "a" or "b".

    Raises:
        PathError: A grid that lacks an end, no point between them, a loss that is not finite, or another kind.
    """
    check_grid(ts)
    if len(ts) < 3 or len(losses) != len(ts):
        raise PathError(
            f"A barrier takes a loss at every t and a t between the ends, not {len(losses)} losses at "
            f"{len(ts)} points",
            "Evaluate on grid(25).",
        )
    for t, loss in zip(ts, losses, strict=True):
        if not math.isfinite(loss):
            raise PathError(
                f"The loss at t = {t:g} is {loss}", "See that both ends are finite and in float32."
            )
    first, last = losses[0], losses[-1]
    if kind == "a":
        excess = [loss - (first + last) / 2 for loss in losses]
    elif kind == "b":
        # So written the excess of the ends is 0 exactly.
        excess = [loss - ((1 - t) * first + t * last) for t, loss in zip(ts, losses, strict=True)]
    else:
        raise PathError(f"There is no barrier of kind {kind!r}", "Kinds are 'a' and 'b'.")
    top = max(range(len(excess)), key=excess.__getitem__)
    return Barrier(excess[top], ts[top], kind, tuple(ts), tuple(excess))
