"""A data set whose solutions by two neurons fall into four components, and how AdamW's and Muon's balls cut them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from isthmus.errors import TwoLayerError
from isthmus.two_layer.network import Ball, Data, Floats, Network
from isthmus.two_layer.radius import minimal_radius

Kind: TypeAlias = Literal["same", "opposite"]
KINDS: tuple[Kind, ...] = ("same", "opposite")

Cell: TypeAlias = tuple[int, int, int, int]
"""The signs of w₁·p, w₁·q, w₂·p, w₂·q."""


@dataclass(frozen=True, eq=False)
class Component:
    """Solutions of zero loss that paths of zero loss connect: one vector, its negative, all rescalings.

    Attributes:
        kind: `same` where one neuron is active on p and q and the other on −p and −q; `opposite` where one is
            active on p and −q.
        product: u₁ = a₁w₁, shape [2]; u₂ = −u₁.
        cell: The signs of w₁·p, w₁·q, w₂·p, w₂·q.
    """

    kind: Kind
    product: Floats
    cell: Cell

    @property
    def network(self) -> Network:
        """A member, a = (1, 1)."""
        return Network(np.ones(2), np.stack([self.product, -self.product]))

    def radius(self, ball: Ball) -> float:
        """The smallest R for which the ball holds a member, in closed form.

        √‖u‖_∞ for `max`; √(2‖u‖) for `operator` and `frobenius`, which agree since W has rank one; 2√‖u‖ for
        `joint`.

        Raises:
            TwoLayerError: an unknown ball.
        """
        length = float(np.linalg.norm(self.product))
        closed = {
            "max": float(np.sqrt(np.abs(self.product).max())),
            "operator": float(np.sqrt(2 * length)),
            "frobenius": float(np.sqrt(2 * length)),
            "joint": float(2 * np.sqrt(length)),
        }
        if ball not in closed:
            raise TwoLayerError(f"ball is {ball}", f"it must be one of {', '.join(closed)}")
        return closed[ball]


@dataclass(frozen=True)
class Window:
    """Radii at which a ball holds solutions of one kind only: low ≤ R < high; weight decay is 1/R.

    Attributes:
        ball: Which.
        kind: The only kind that it holds.
        low: The kind's own smallest radius.
        high: That of the other kind.
    """

    ball: Ball
    kind: Kind
    low: float
    high: float


def two_neuron_data(same: Floats | None = None, opposite: Floats | None = None) -> Data:
    """Points ±p, ±q, all labels 1, so that u·p = u·q = 1 and u′·p = 1, u′·q = −1.

    Two neurons reach zero loss only with both aᵢ > 0, and then each is active on one point of each antipodal
    pair; so u₁ = a₁w₁ is one of u, −u, u′, −u′ and u₂ = −u₁.

    Args:
        same: u, shape [2]; (1, 1) by default.
        opposite: u′, shape [2]; (1.2, 0) by default.

    Returns:
        Points p, −p, q, −q; for the defaults p = (5/6, 1/6), q = (−5/6, 11/6).

    Raises:
        TwoLayerError: u and u′ are parallel, or no vectors of two entries.
    """
    u = np.array([1.0, 1.0] if same is None else same, dtype=np.float64)
    v = np.array([1.2, 0.0] if opposite is None else opposite, dtype=np.float64)
    if u.shape != (2,) or v.shape != (2,):
        raise TwoLayerError(
            f"u and u′ have the shapes {list(u.shape)} and {list(v.shape)}", "give two numbers each"
        )
    if abs(u[0] * v[1] - u[1] * v[0]) <= 1e-9 * np.linalg.norm(u) * np.linalg.norm(v):
        raise TwoLayerError("u and u′ are parallel", "take two independent vectors")
    p, q = np.linalg.solve(np.stack([u, v]), np.array([[1.0, 1.0], [1.0, -1.0]])).T
    return Data.of(np.stack([p, -p, q, -q]), np.ones(4))


def components(data: Data) -> tuple[Component, ...]:
    """The four components: u first, u second, u′ first, u′ second.

    Args:
        data: Points ±p, ±q and labels 1, as `two_neuron_data` gives them.

    Raises:
        TwoLayerError: other data.
    """
    p, q = antipodal_pairs(data)
    found = []
    for kind, sign in (("same", 1), ("opposite", -1)):
        product = np.linalg.solve(np.stack([p, q]), np.array([1.0, float(sign)]))
        found.append(Component(_kind(kind), product, (1, sign, -1, -sign)))
        found.append(Component(_kind(kind), -product, (-1, -sign, 1, sign)))
    return tuple(found)


def window(data: Data, ball: Ball) -> Window | None:
    """The radii at which the ball holds one kind only; None where both kinds need the same radius.

    Args:
        data: See `components`.
        ball: See `norm`.

    Raises:
        TwoLayerError: other data, an unknown ball.
    """
    all_four = components(data)
    radii = {component.kind: component.radius(ball) for component in all_four}
    if radii["same"] == radii["opposite"]:
        return None
    kind: Kind = min(KINDS, key=radii.__getitem__)
    return Window(ball, kind, radii[kind], max(radii.values()))


def checked_radii(data: Data, ball: Ball) -> dict[Kind, tuple[float, float]]:
    """By kind the closed form and what `minimal_radius` finds for a member.

    Args:
        data: See `components`.
        ball: See `norm`.
    """
    return {
        component.kind: (component.radius(ball), minimal_radius(component.network, ball).value)
        for component in components(data)
    }


def cell_of(network: Network, data: Data) -> Cell:
    """The signs of w₁·p, w₁·q, w₂·p, w₂·q.

    Raises:
        TwoLayerError: other data, other widths than 2.
    """
    if network.width != 2:
        raise TwoLayerError(f"the network has {network.width} neurons", "give one of two neurons")
    p, q = antipodal_pairs(data)
    first, second, third, fourth = np.sign(network.inner @ np.stack([p, q]).T).astype(int).ravel()
    return int(first), int(second), int(third), int(fourth)


def component_of(network: Network, data: Data, below: float = 0.5) -> Component | None:
    """The component that a network of a loss below ½ belongs to.

    No path of loss below ½ leaves its cell (see `split_certificate`). In a cell with solutions a loss below ½
    needs both aᵢ > 0, and the loss is convex in the uᵢ: a straight line in them leads to the solution.

    Args:
        network: Two neurons.
        data: See `components`.
        below: From this loss on the answer is None; at most ½.

    Raises:
        TwoLayerError: other data, other widths than 2, `below` above ½.
    """
    if not below <= 0.5:
        raise TwoLayerError(f"below is {below}", "above 1/2 a network belongs to no component")
    cell = cell_of(network, data)
    if not network.loss(data) < below:
        return None
    return next((one for one in components(data) if one.cell == cell), None)


def antipodal_pairs(data: Data) -> tuple[Floats, Floats]:
    """The points p and q of data ±p, ±q with labels 1.

    Raises:
        TwoLayerError: other data, or parallel p and q.
    """
    x = data.points
    if (
        x.shape != (4, 2)
        or (x[1] != -x[0]).any()
        or (x[3] != -x[2]).any()
        or (data.labels != 1).any()
    ):
        raise TwoLayerError(
            "the data are not four points p, −p, q, −q in the plane with labels 1",
            "take those of two_neuron_data",
        )
    if x[0, 0] * x[2, 1] == x[0, 1] * x[2, 0]:
        raise TwoLayerError("p and q are parallel", "take independent points")
    return x[0], x[2]


def _kind(name: str) -> Kind:
    return "same" if name == "same" else "opposite"
