"""Two-layer ReLU networks without biases, their loss, and the balls that optimizers keep them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from isthmus.errors import TwoLayerError

Floats: TypeAlias = NDArray[np.float64]
Ball: TypeAlias = Literal["max", "operator", "frobenius", "joint"]
BALLS: tuple[Ball, ...] = get_args(Ball)


@dataclass(frozen=True, eq=False)
class Data:
    """Points and labels.

    Attributes:
        points: X, shape [n, d]; one point a row.
        labels: y, shape [n].
    """

    points: Floats
    labels: Floats

    @classmethod
    def of(cls, points: ArrayLike, labels: ArrayLike) -> Data:
        """From anything that numpy reads.

        Raises:
            TwoLayerError: other shapes than [n, d] and [n], no points, NaN or infinity.
        """
        x, y = finite("points", points, 2), finite("labels", labels, 1)
        if len(x) != len(y):
            raise TwoLayerError(
                f"there are {len(x)} points (axis 0) and {len(y)} labels", "give one label a point"
            )
        return cls(x, y)


@dataclass(frozen=True, eq=False)
class Network:
    """f(x) = Σᵢ aᵢ·relu(wᵢ·x).

    Attributes:
        outer: a, shape [m].
        inner: W, shape [m, d]; wᵢ is row i.
    """

    outer: Floats
    inner: Floats

    @classmethod
    def of(cls, outer: ArrayLike, inner: ArrayLike) -> Network:
        """From anything that numpy reads.

        Raises:
            TwoLayerError: other shapes than [m] and [m, d], NaN or infinity.
        """
        a, w = finite("outer weights", outer, 1), finite("inner weights", inner, 2)
        if len(a) != len(w):
            raise TwoLayerError(
                f"there are {len(a)} outer weights and {len(w)} rows of inner weights (axis 0)",
                "give one outer weight a neuron",
            )
        return cls(a, w)

    @property
    def width(self) -> int:
        """The number m of neurons."""
        return len(self.outer)

    @property
    def products(self) -> Floats:
        """uᵢ = |aᵢ|wᵢ, shape [m, d]: with the signs of a all that the function depends on."""
        return np.abs(self.outer)[:, None] * self.inner

    def outputs(self, points: Floats) -> Floats:
        """The outputs at points of shape [n, d]; shape [n]."""
        return np.maximum(points @ self.inner.T, 0) @ self.outer

    def loss(self, data: Data) -> float:
        """½Σ(f(x) − y)²."""
        return 0.5 * float(np.square(self.outputs(data.points) - data.labels).sum())


def norm(network: Network, ball: Ball) -> float:
    """The smallest R for which the network is in the ball.

    Args:
        network: The network.
        ball: `max`: the largest entry of a and W (AdamW, Lion, Signum); `operator`: the larger of ‖a‖ and
            ‖W‖_op (Muon); `frobenius`: the larger of ‖a‖ and ‖W‖_F (normalised gradient descent, each
            parameter by its own norm); `joint`: √(‖a‖² + ‖W‖_F²) (the same, all parameters by one norm).

    Raises:
        TwoLayerError: an unknown ball.
    """
    a, w = network.outer, network.inner
    if ball == "max":
        return float(max(np.abs(a).max(), np.abs(w).max()))
    if ball == "operator":
        return float(max(np.linalg.norm(a), np.linalg.norm(w, 2)))
    if ball == "frobenius":
        return float(max(np.linalg.norm(a), np.linalg.norm(w)))
    if ball == "joint":
        return float(np.hypot(np.linalg.norm(a), np.linalg.norm(w)))
    raise TwoLayerError(f"ball is {ball}", f"it must be one of {', '.join(BALLS)}")


def finite(name: str, values: ArrayLike, axes: int) -> Floats:
    """Float64, checked.

    Raises:
        TwoLayerError: another number of axes, an empty axis, NaN or infinity.
    """
    array = np.array(values, dtype=np.float64)
    if array.ndim != axes or not array.size:
        raise TwoLayerError(
            f"the {name} have the shape {list(array.shape)}",
            f"give an array of {axes} ax{'i' if axes == 1 else 'e'}s, none of them empty",
        )
    if not np.isfinite(array).all():
        raise TwoLayerError(f"the {name} hold NaN or infinity", "give finite numbers")
    return array
