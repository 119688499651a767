"""A smooth curve through gains, how far they scatter around it, and where it is highest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import IsthmusError

Array = NDArray[np.float64]

BANDWIDTHS = (0.1, 0.15, 0.2, 0.3, 0.45, 0.7, 1.0, 1.5)
"""Of the kernel, in powers of e of the knob; the one that foretells left-out points best is taken."""

_LEAST = 4


@dataclass(frozen=True)
class Curve:
    """Kernel regression on the logarithm of a knob (Nadaraya and Watson, with a Gaussian kernel).

    Attributes:
        x: The knob, above 0, shape [n].
        y: Gains, shape [n].
        bandwidth: Of the kernel, in ln x.
        spread: The root mean square error with which the curve through all other points foretells a point: small
            where the knob alone decides the gain, and about the deviation of the gains where it says nothing.
    """

    x: Array
    y: Array
    bandwidth: float
    spread: float

    def at(self, x: Array) -> Array:
        """The curve at other values of the knob, shape as given."""
        weights = _weights(_squares(np.log(x), np.log(self.x), self.bandwidth))
        return np.asarray((weights @ self.y) / weights.sum(axis=1))


def smooth_curve(x: Array, y: Array) -> Curve:
    """Choose the bandwidth by leaving out one point at a time.

    Points at the same x as the one that is left out stay, so that a knob of few values is judged by the mean of
    the others at the same value.

    Args:
        x: The knob, above 0, shape [n].
        y: Gains, shape [n].

    Raises:
        IsthmusError: Fewer than four points, or values that are not finite or not above 0.
    """
    x, y = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    if len(x) != len(y) or len(x) < _LEAST:
        raise IsthmusError(
            f"A curve through {len(x)} knobs and {len(y)} gains says nothing",
            f"Give {_LEAST} points or more.",
        )
    if not (np.isfinite(x).all() and np.isfinite(y).all() and (x > 0).all()):
        raise IsthmusError(
            "A knob or a gain is not finite, or a knob is not above 0",
            "Leave out runs that diverged, and knobs that are 0.",
        )
    errors = []
    for bandwidth in BANDWIDTHS:
        squares = _squares(np.log(x), np.log(x), bandwidth)
        np.fill_diagonal(squares, np.inf)
        weights = _weights(squares)
        errors.append(float(np.sqrt(np.mean(((weights @ y) / weights.sum(axis=1) - y) ** 2))))
    best = int(np.argmin(errors))
    return Curve(x, y, BANDWIDTHS[best], errors[best])


@dataclass(frozen=True)
class Optimum:
    """Where the curve is highest, with intervals from a bootstrap over the points.

    Attributes:
        at: The knob there.
        interval: Of `at`, from the 2.5th to the 97.5th percentile.
        height: The curve there.
        rise: Height above the curve at the smallest knob.
        fall: Height above the curve at the largest knob.
        interior: The share of the bootstrap's curves that are higher at `at` than at either end.
    """

    at: float
    interval: tuple[float, float]
    height: float
    rise: float
    fall: float
    interior: float


def optimum(curve: Curve, *, resamples: int = 1000, seed: int = 0) -> Optimum:
    """Find the highest place of a curve, on a grid of 200 places even in ln x.

    Args:
        curve: With the bandwidth that all resampled curves take.
        resamples: Of the bootstrap.
        seed: Of the bootstrap.
    """
    places = np.exp(np.linspace(np.log(curve.x.min()), np.log(curve.x.max()), 200))
    line = curve.at(places)
    top = int(np.argmax(line))
    generator = np.random.default_rng(seed)
    tops, inside = [], []
    for _ in range(resamples):
        drawn = generator.integers(0, len(curve.x), len(curve.x))
        again = Curve(curve.x[drawn], curve.y[drawn], curve.bandwidth, curve.spread)
        other = again.at(places)
        tops.append(int(np.argmax(other)))
        inside.append(other[top] > max(other[0], other[-1]))
    low, high = np.percentile(places[tops], [2.5, 97.5])
    return Optimum(
        float(places[top]),
        (float(low), float(high)),
        float(line[top]),
        float(line[top] - line[0]),
        float(line[top] - line[-1]),
        float(np.mean(inside)),
    )


def _squares(places: Array, points: Array, bandwidth: float) -> Array:
    """Half the squared distances in bandwidths, shape [places, points]."""
    return np.asarray(((places[:, None] - points[None, :]) / bandwidth) ** 2 / 2)


def _weights(squares: Array) -> Array:
    """Gaussian weights, the nearest point's 1: scaling a row changes no mean, and keeps it from vanishing."""
    return np.asarray(np.exp(squares.min(axis=1, keepdims=True) - squares))
