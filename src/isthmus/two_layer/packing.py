"""Packing a network into few neurons along a path that changes no output and leaves no ball."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog

from isthmus.errors import TwoLayerError
from isthmus.two_layer.network import Ball, Data, Floats, Network, norm
from isthmus.two_layer.patterns import Patterns
from isthmus.two_layer.pieces import Blend, Piece, Rescaling, line

Group = tuple[int, int]
"""The number of a pattern and the sign of a."""

_BOUNDARY = 1e-12
"""Relative size of w·x below which a neuron may be taken for either side of a point."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A network of few neurons, and the way to it.

    Attributes:
        pieces: The path; empty where nothing had to move.
        network: Its end; neurons that do not carry are 0 in both layers.
        carriers: The neurons that are not 0.
    """

    pieces: tuple[Piece, ...]
    network: Network
    carriers: tuple[int, ...]


def groups(network: Network, found: Patterns) -> dict[Group, NDArray[np.intp]]:
    """Which neurons have the same pattern and the same sign of a; silent ones, with no output on the data, in none.

    Args:
        network: Any.
        found: The patterns of its data. A neuron on the boundary of chambers counts for the first of them.

    Raises:
        TwoLayerError: networks for another dimension, or a neuron that fits no pattern.
    """
    x = found.points
    if network.inner.shape[1] != x.shape[1]:
        raise TwoLayerError(
            f"the network takes points of dimension {network.inner.shape[1]}, the data have {x.shape[1]}",
            "take a network for these data",
        )
    sides = network.inner @ x.T
    slack = _BOUNDARY * np.linalg.norm(network.inner, axis=1)[:, None] * np.linalg.norm(x, axis=1)
    members: dict[Group, list[int]] = {}
    for i, a in enumerate(network.outer):
        on, off = sides[i] > slack[i], sides[i] < -slack[i]
        if a == 0 or not on.any():
            continue
        fits = (found.active | ~on).all(axis=1) & (~found.active | ~off).all(axis=1)
        if not fits.any():
            raise TwoLayerError(
                f"neuron {i} has an activation pattern that is not among the {found.count} given",
                "take the patterns of the same data",
            )
        members.setdefault((int(fits.argmax()), int(np.sign(a))), []).append(i)
    return {group: np.array(members[group]) for group in sorted(members)}


def cone_count(network: Network, found: Patterns, radius: float) -> int:
    """Σ ⌈‖Σ|aᵢ|wᵢ‖_∞/R²⌉ over groups: neurons that the max ball needs while no weight moves between groups.

    Args:
        network: Any.
        found: The patterns of its data.
        radius: R.

    Raises:
        TwoLayerError: as `groups` does.
    """
    sums = (network.products[mine].sum(axis=0) for mine in groups(network, found).values())
    return sum(_copies(total / radius, radius) for total in sums)


def pack(network: Network, data: Data, found: Patterns, ball: Ball, radius: float) -> Packed:
    """Pack a network; outputs on the data stay as they are and so does the ball.

    For `operator`, `frobenius` and `joint` every group of neurons ends in one; for `max` in ⌈τ/R²⌉, with τ the
    largest entry of Σ|aᵢ|wᵢ, or in what a linear program finds that moves weight between groups, if that is
    fewer. docs/two-layer.md has the proof that nothing leaves the ball.

    Args:
        network: In the ball.
        data: The data.
        found: Their patterns.
        ball: See `norm`.
        radius: R.

    Raises:
        TwoLayerError: the network is outside the ball, or for other data.
    """
    size = norm(network, ball)
    if not size <= radius * (1 + 1e-12):
        raise TwoLayerError(
            f"the network has the {ball} norm {size}, and the ball the radius {radius}",
            "take a larger radius, or balance the network with minimal_radius",
        )
    members = groups(network, found)
    if ball == "max":
        return _spread(network, data, found, members, max(radius, size))
    return _rotate(network, members)


def _rotate(network: Network, members: dict[Group, NDArray[np.intp]]) -> Packed:
    """W → [(1 − t)I + t·aaᵀ/‖a‖²]W in each group, then a/‖a‖ → e_k together with W."""
    a, w = network.outer, network.inner
    merged, outer, inner = np.zeros_like(w), np.zeros_like(a), np.zeros_like(w)
    # Silent neurons fade: their w along the line, their a along the quarter of a turn.
    angles = np.full(network.width, np.pi / 2)
    carriers = []
    for mine in members.values():
        length = float(np.linalg.norm(a[mine]))
        direction = a[mine] / length
        total = direction @ w[mine]
        carrier = int(mine[np.abs(direction).argmax()])
        merged[mine] = np.outer(direction, total)
        outer[carrier] = math.copysign(length, a[carrier])
        inner[carrier] = math.copysign(1, a[carrier]) * total
        angles[mine] = math.acos(min(1.0, float(np.abs(direction).max())))
        carriers.append(carrier)
    straight = line(network, Network(a, merged))
    turned = Blend(straight.end, Network(outer, inner), angles)
    return Packed((straight, turned), turned.end, tuple(sorted(carriers)))


def _spread(
    network: Network,
    data: Data,
    found: Patterns,
    members: dict[Group, NDArray[np.intp]],
    radius: float,
) -> Packed:
    """Live neurons to |a| = R, then w along a line to as few of each group as hold the group's sum."""
    live = np.zeros(network.width, dtype=bool)
    for mine in members.values():
        live[mine] = True
    quiet = line(network, Network(network.outer, network.inner * live[:, None]))
    logs = np.zeros(network.width)
    logs[live] = np.log(radius / np.abs(network.outer[live]))
    grown = Rescaling(quiet.end, logs)
    start = grown.end
    sums = {group: start.inner[mine].sum(axis=0) for group, mine in members.items()}
    fewer = _fewest(data, found, members, radius)
    if fewer is not None and _needed(fewer, radius) < _needed(sums, radius):
        sums = fewer
    inner = np.zeros_like(start.inner)
    carriers: list[int] = []
    for group, total in sums.items():
        count = _copies(total, radius)
        # The sum of n vectors within the box may round to a little more than n boxes.
        chosen = members[group][: min(count, len(members[group]))]
        if len(chosen):
            inner[chosen] = total / len(chosen)
            carriers += [int(i) for i in chosen]
    moved = line(start, Network(start.outer, inner))
    carries = np.zeros(network.width, dtype=bool)
    carries[carriers] = True
    faded = line(moved.end, Network(np.where(carries, start.outer, 0), inner))
    return Packed((quiet, grown, moved, faded), faded.end, tuple(sorted(carriers)))


def _copies(total: Floats, radius: float) -> int:
    # Relative slack: a τ of 3.0000000001 boxes needs three.
    return math.ceil(float(np.abs(total).max()) / radius * (1 - 1e-9) - 1e-12)


def _needed(sums: dict[Group, Floats], radius: float) -> int:
    return sum(_copies(total, radius) for total in sums.values())


def _fewest(
    data: Data, found: Patterns, members: dict[Group, NDArray[np.intp]], radius: float
) -> dict[Group, Floats] | None:
    """Sums v of w by group with Σ‖v‖_∞ least, in their cones and boxes, with the labels as outputs.

    The sums of all solutions with the same groups are a convex set, so the line to this one stays in it.
    """
    if not members:
        return None
    x, n = data.points, len(data.points)
    d, count = x.shape[1], len(members)
    keys = list(members)
    equations = np.zeros((n, count * (d + 1)))
    cones = np.zeros((count * (n + 2 * d), count * (d + 1)))
    for g, (pattern, sign) in enumerate(keys):
        at, top, row = slice(g * d, (g + 1) * d), count * d + g, g * (n + 2 * d)
        active = found.active[pattern]
        equations[:, at] = radius * sign * active[:, None] * x
        cones[row : row + n, at] = np.where(active, -1, 1)[:, None] * x
        for side in (1, -1):
            rows = slice(row + n + (0 if side == 1 else d), row + n + (d if side == 1 else 2 * d))
            cones[rows, at] = side * np.eye(d)
            cones[rows, top] = -1
    solved = linprog(
        np.repeat([0.0, 1.0], [count * d, count]),
        A_ub=cones,
        b_ub=np.zeros(len(cones)),
        A_eq=equations,
        b_eq=data.labels,
        bounds=[(None, None)] * (count * d)
        + [(0, radius * len(mine)) for mine in members.values()],
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    # A network that does not interpolate has no such sums; it is packed as it is.
    if solved.status != 0:
        return None
    sums = solved.x[: count * d].reshape(count, d)
    largest = np.abs(sums).max()
    return {
        key: np.where(np.abs(v).max() > 1e-11 * largest, v, 0)
        for key, v in zip(keys, sums, strict=True)
    }
