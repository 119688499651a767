"""Bounds on loss and norm that hold on a whole path, not on a grid of it only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from isthmus.errors import TwoLayerError
from isthmus.two_layer.network import BALLS, Ball, Data, Floats, Network
from isthmus.two_layer.pieces import Piece

_EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class NetworkPath:
    """Pieces that follow one another; the second half of those are walked backwards.

    Attributes:
        forward: From the start.
        backward: From the end; the last network of both is the same.
    """

    forward: tuple[Piece, ...]
    backward: tuple[Piece, ...] = ()

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces in the order in which they are met."""
        return (*self.forward, *reversed(self.backward))

    @property
    def joints(self) -> float:
        """The largest jump of a weight between two pieces; 0 for a path."""
        chains = [*zip(self.forward, self.forward[1:], strict=False)]
        chains += zip(self.backward, self.backward[1:], strict=False)
        gaps = [_apart(one.end, other.start) for one, other in chains]
        if self.forward and self.backward:
            gaps.append(_apart(self.forward[-1].end, self.backward[-1].end))
        return max(gaps, default=0.0)


@dataclass(frozen=True)
class PathBound:
    """What holds at every t of a path, in exact arithmetic from its stored control points.

    Attributes:
        loss: No loss is above.
        norm: No norm is above.
        grid_loss: The largest loss on the grid: what a sample would have said.
        grid_norm: The largest norm on the grid.
        joints: The largest jump of a weight between the floats where one piece ends and the next begins.
    """

    loss: float
    norm: float
    grid_loss: float
    grid_norm: float
    joints: float


def certify(path: NetworkPath, data: Data, ball: Ball, intervals: int = 256) -> PathBound:
    """Bound loss and norm on a whole path.

    On each interval of the grid every residual is at most the larger of its ends plus `Piece.deviation`, and
    the norm likewise. An allowance for the rounding of the grid's values is added to both.

    Args:
        path: Of networks that fit the data.
        data: The data.
        ball: Of the norm.
        intervals: A piece; the bounds fall with them.

    Raises:
        TwoLayerError: an unknown ball, no intervals, networks for another dimension.
    """
    if ball not in BALLS:
        raise TwoLayerError(f"ball is {ball}", f"it must be one of {', '.join(BALLS)}")
    if intervals < 1:
        raise TwoLayerError(f"intervals is {intervals}", "it must be at least 1")
    bounds = [_piece(piece, data, ball, intervals) for piece in path.pieces]
    loss, norm, grid_loss, grid_norm = (max(column) for column in zip(*bounds, strict=True))
    return PathBound(loss, norm, grid_loss, grid_norm, path.joints)


def _piece(
    piece: Piece, data: Data, ball: Ball, intervals: int
) -> tuple[float, float, float, float]:
    x = data.points
    if piece.start.inner.shape[1] != x.shape[1]:
        raise TwoLayerError(
            f"the networks take points of dimension {piece.start.inner.shape[1]}, the data have {x.shape[1]}",
            "take the data that the path was made for",
        )
    a, w = piece.at(np.linspace(0, 1, intervals + 1))
    hidden = np.maximum(w @ x.T, 0)
    residuals = np.abs(np.einsum("tm,tmn->tn", a, hidden) - data.labels)
    losses = 0.5 * np.square(residuals).sum(axis=1)
    norms = _norms(a, w, ball)
    # |fl(uᵀv) − uᵀv| ≤ k·ε·|u|ᵀ|v| for k terms, with slack for the coefficients of the piece.
    terms = a.shape[1] + x.shape[1] + 32
    sizes = np.einsum("tm,tmn->tn", np.abs(a), np.abs(w) @ np.abs(x).T).max(axis=0) + np.abs(
        data.labels
    )
    rounding = terms * _EPSILON * sizes
    extra = piece.deviation(x, 1 / intervals) + rounding
    highest = np.maximum(residuals[1:], residuals[:-1]) + extra
    loss = 0.5 * float(np.square(highest).sum(axis=1).max()) * (1 + terms * _EPSILON)
    norm = float(norms.max()) * (1 + a.shape[1] * terms * _EPSILON)
    norm += piece.norm_deviation(ball, 1 / intervals)
    return loss, norm, float(losses.max()), float(norms.max())


def _norms(a: Floats, w: Floats, ball: Ball) -> Floats:
    """As `norm`, at many times."""
    if ball == "max":
        return np.asarray(np.maximum(np.abs(a).max(axis=1), np.abs(w).max(axis=(1, 2))))
    outer = np.linalg.norm(a, axis=1)
    inner = np.linalg.norm(w, 2 if ball == "operator" else "fro", axis=(1, 2))
    return np.asarray(np.hypot(outer, inner) if ball == "joint" else np.maximum(outer, inner))


def _apart(one: Network, other: Network) -> float:
    return float(max(np.abs(one.outer - other.outer).max(), np.abs(one.inner - other.inner).max()))
