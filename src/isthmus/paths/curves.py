"""Curves through control points: coefficient functions, in the manner of Garipov et al. 2018 (arXiv 1802.10026)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.errors import PathError
from isthmus.methods.slerp import slerp_coefficients
from isthmus.paths.mixing import Parameters, mixed, same_shape, wide


class Curve(ABC):
    """A curve over t in [0, 1], from the first control point to the last.

    Attributes:
        controls: How many control points it has; those between the ends are its bends.
    """

    controls: int

    @abstractmethod
    def tensor(self, t: float, points: Sequence[Parameters], name: str) -> Tensor:
        """One tensor of the curve's point at t, in float32 at least.

        Args:
            t: Between 0 and 1.
            points: The control points, as many as `controls`.
            name: Which tensor.

        Raises:
            PathError: The points have different shapes.
        """


class Combination(Curve):
    """A curve Σ c_k(t) x_k: one combination of the control points for all tensors."""

    @abstractmethod
    def coefficients(self, t: float) -> Tensor:
        """c(t), shape [controls], float64, of sum 1."""

    def tensor(self, t: float, points: Sequence[Parameters], name: str) -> Tensor:
        """Σ c_k(t) x_k; see `Curve.tensor`."""
        return mixed(self.coefficients(t).tolist(), points, name)


class PolygonalChain(Combination):
    """Straight pieces from control point to control point, each as long in t as the others.

    Args:
        bends: How many points lie between the ends.

    Raises:
        PathError: Fewer than one.
    """

    def __init__(self, bends: int = 1) -> None:
        _check_bends(bends)
        self.controls = bends + 2

    def __repr__(self) -> str:
        return f"PolygonalChain(bends={self.controls - 2})"

    def coefficients(self, t: float) -> Tensor:
        """max(0, 1 − |t(C−1) − k|) for the control points k = 0 … C−1."""
        places = torch.arange(self.controls, dtype=torch.float64)
        return (1 - (t * (self.controls - 1) - places).abs()).clamp(min=0)


class Bezier(Combination):
    """The Bézier curve, which leaves and reaches its ends in the direction of the next bend.

    Args:
        bends: How many control points lie between the ends; the degree is one more.

    Raises:
        PathError: Fewer than one.
    """

    def __init__(self, bends: int = 1) -> None:
        _check_bends(bends)
        self.controls = bends + 2

    def __repr__(self) -> str:
        return f"Bezier(bends={self.controls - 2})"

    def coefficients(self, t: float) -> Tensor:
        """The Bernstein polynomials C(n, k) tᵏ(1−t)ⁿ⁻ᵏ of degree n = C−1."""
        n = self.controls - 1
        return torch.tensor(
            [math.comb(n, k) * t**k * (1 - t) ** (n - k) for k in range(n + 1)],
            dtype=torch.float64,
        )


class Linear(Combination):
    """The straight line."""

    controls = 2

    def __repr__(self) -> str:
        return "Linear()"

    def coefficients(self, t: float) -> Tensor:
        """1 − t and t."""
        return torch.tensor([1 - t, t], dtype=torch.float64)


class Spherical(Curve):
    """For every tensor the great circle between its ends, as the merge method slerp takes it.

    Ends of equal norm keep it along the way; nearly parallel or opposite ones are joined by a straight line.
    """

    controls = 2

    def __repr__(self) -> str:
        return "Spherical()"

    def tensor(self, t: float, points: Sequence[Parameters], name: str) -> Tensor:
        """sin((1−t)θ)/sin θ · x₀ + sin(tθ)/sin θ · x₁; see `Curve.tensor`."""
        if t in (0, 1):
            return mixed((1 - t, t), points, name)
        first = points[0][name]
        if not first.is_floating_point():
            return first
        last = points[1][name]
        same_shape(name, first, last)
        a, b = wide(first), wide(last)
        weights = slerp_coefficients(_cosine(a, b), t)
        return weights[0] * a + weights[1] * b


def _cosine(a: Tensor, b: Tensor) -> float:
    """Of the angle between two flattened tensors; 0 where one vanishes, as it has no direction."""
    x, y = a.detach().double().flatten(), b.detach().double().flatten()
    scale = float(x.norm() * y.norm())
    return max(-1.0, min(1.0, float(x @ y) / scale)) if scale else 0.0


def _check_bends(bends: int) -> None:
    if bends < 1:
        raise PathError(
            f"A bent path has at least one bend, not {bends}",
            "Give bends=1 or more, or take the straight line, Linear().",
        )
