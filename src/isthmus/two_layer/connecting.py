"""Paths of zero loss between two wide networks, inside the ball of their optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isthmus.errors import TwoLayerError
from isthmus.two_layer.certified import NetworkPath, PathBound, certify
from isthmus.two_layer.network import Ball, Data, Network, norm
from isthmus.two_layer.packing import Packed, pack
from isthmus.two_layer.patterns import Patterns, patterns
from isthmus.two_layer.pieces import Blend


@dataclass(frozen=True, eq=False)
class Connection:
    """What the construction says about two networks.

    Attributes:
        needed: The neurons into which each was packed; their sum must not exceed the width.
        width: m.
        path: From the first to the second; None where the width is too small for this construction, which
            does not mean that no path exists.
        bound: Of loss and norm on the whole path.
    """

    needed: tuple[int, int]
    width: int
    path: NetworkPath | None
    bound: PathBound | None


def sufficient_width(found: Patterns) -> int:
    """4P, at which any two solutions in a ball of the operator or a Frobenius norm are connected.

    P counts the patterns that are active somewhere: neurons of the others fade to 0.

    Args:
        found: The patterns of the data.
    """
    return 4 * found.seen


def connect(
    first: Network,
    second: Network,
    data: Data,
    ball: Ball,
    radius: float | None = None,
    *,
    found: Patterns | None = None,
    intervals: int = 256,
) -> Connection:
    """Connect two networks without leaving the ball, at a loss of no more than the larger of theirs.

    Each is packed, the second network's carriers move to neurons that are free in both, and then
    (cos φ·A, sin φ·B) leads from one to the other: its outputs are cos²φ·f_A + sin²φ·f_B. For networks that do
    not interpolate exactly, the max ball's packing adds what the linear program leaves.

    Args:
        first: A solution.
        second: Another, of the same width.
        data: The data.
        ball: See `norm`.
        radius: R; the larger norm of the two by default.
        found: The patterns of the data, if they are known.
        intervals: See `certify`.

    Raises:
        TwoLayerError: widths or dimensions differ, or a network is outside the ball.
    """
    if first.inner.shape != second.inner.shape:
        raise TwoLayerError(
            f"the inner weights have the shapes {list(first.inner.shape)} and {list(second.inner.shape)}",
            "connect networks of one width; a narrow one can be given neurons of zeros",
        )
    known = patterns(data.points) if found is None else found
    size = max(norm(first, ball), norm(second, ball)) if radius is None else radius
    a, b = (pack(network, data, known, ball, size) for network in (first, second))
    needed = (len(a.carriers), len(b.carriers))
    if sum(needed) > first.width:
        return Connection(needed, first.width, None, None)
    b = _make_room(b, set(a.carriers))
    quarter = np.full(first.width, np.pi / 2)
    path = NetworkPath((*a.pieces, Blend(a.network, b.network, quarter)), b.pieces)
    return Connection(needed, first.width, path, certify(path, data, ball, intervals))


def _make_room(packed: Packed, taken: set[int]) -> Packed:
    """Carriers that are taken move, by a quarter of a turn, to neurons that are free."""
    mine = set(packed.carriers)
    free = [i for i in range(packed.network.width) if i not in taken and i not in mine]
    moves = dict(zip(sorted(mine & taken), free, strict=False))
    if not moves:
        return packed
    outer, inner = packed.network.outer.copy(), packed.network.inner.copy()
    angles = np.zeros(packed.network.width)
    for here, there in moves.items():
        outer[there], inner[there] = outer[here], inner[here]
        outer[here], inner[here] = 0, 0
        angles[[here, there]] = np.pi / 2
    moved = Blend(packed.network, Network(outer, inner), angles)
    carriers = tuple(sorted((mine - set(moves)) | set(moves.values())))
    return Packed((*packed.pieces, moved), moved.end, carriers)
