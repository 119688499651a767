"""Pieces of paths between two-layer networks, and what can be said of them between grid points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from isthmus.two_layer.network import Ball, Floats, Network


class Piece(Protocol):
    """A curve of networks over t in [0, 1]."""

    @property
    def start(self) -> Network:
        """At t = 0."""

    @property
    def end(self) -> Network:
        """At t = 1."""

    def at(self, times: Floats) -> tuple[Floats, Floats]:
        """Weights at times of shape [T]: a of shape [T, m], W of shape [T, m, d]."""

    def deviation(self, points: Floats, step: float) -> Floats:
        """How far f is from its chord over any interval of times of the length `step`, at most; shape [n]."""

    def norm_deviation(self, ball: Ball, step: float) -> float:
        """How far the norm exceeds the larger of its values at the ends of such an interval, at most."""


@dataclass(frozen=True, eq=False)
class Blend:
    """Neuron i goes along c₀(t)θᵢ + c₁(t)θᵢ′, with c₀ = sin(ωᵢ(1 − t))/sin ωᵢ and c₁ = sin(ωᵢt)/sin ωᵢ.

    A straight line for ωᵢ = 0, a quarter of a turn (cos, sin) for ωᵢ = π/2. Both coefficients lie in [0, 1],
    c″ = −ω²c, and |c′| ≤ ω/sin ω.

    Attributes:
        start: θ.
        end: θ′.
        angles: ω, shape [m], each in [0, π/2].
    """

    start: Network
    end: Network
    angles: Floats

    def at(self, times: Floats) -> tuple[Floats, Floats]:
        """See `Piece`."""
        t, omega = times[:, None], self.angles
        sine = np.where(omega > 0, np.sin(omega), 1)
        first = np.where(omega > 0, np.sin(omega * (1 - t)) / sine, 1 - t)
        second = np.where(omega > 0, np.sin(omega * t) / sine, t)
        a = first * self.start.outer + second * self.end.outer
        w = first[:, :, None] * self.start.inner + second[:, :, None] * self.end.inner
        return a, w

    def deviation(self, points: Floats, step: float) -> Floats:
        """See `Piece`.

        For each neuron and point the smaller of two bounds on a·relu(z): of Lipschitz type, step/2 times
        sup|(a·relu(z))′|; and, with z or 0 in place of relu(z), step²/8 times sup|(az)″|, plus twice what the
        replacement changes, which is nothing where z keeps its sign.
        """
        z0, z1 = self.start.inner @ points.T, self.end.inner @ points.T
        a0, a1 = self.start.outer[:, None], self.end.outer[:, None]
        omega = self.angles[:, None]
        a, a_rate = self._bounds(a0, a1, omega)
        z, z_rate = self._bounds(z0, z1, omega)
        positive = np.maximum(z0, 0) + np.maximum(z1, 0)
        negative = np.maximum(-z0, 0) + np.maximum(-z1, 0)
        lipschitz = step / 2 * (a_rate * positive + a * z_rate)
        second = 2 * a_rate * z_rate + 2 * omega**2 * a * z
        active = positive >= negative
        smooth = step**2 / 8 * second * active + 2 * a * np.minimum(positive, negative)
        return np.asarray(np.minimum(lipschitz, smooth).sum(axis=0))

    @staticmethod
    def _bounds(start: Floats, end: Floats, omega: Floats) -> tuple[Floats, Floats]:
        """The largest size and rate of c₀·start + c₁·end."""
        straight = omega == 0
        both = np.abs(start) + np.abs(end)
        rate = np.where(
            straight, np.abs(end - start), both * omega / np.where(straight, 1, np.sin(omega))
        )
        return np.where(straight, np.maximum(np.abs(start), np.abs(end)), both), rate

    def norm_deviation(self, ball: Ball, step: float) -> float:
        """See `Piece`: the curve is within step²/8·sup‖θ″‖ of its chord, along which the norm is convex."""
        del ball
        squares = self.angles**2
        sizes = [
            np.concatenate([one.outer[:, None], one.inner], axis=1) * squares[:, None]
            for one in (self.start, self.end)
        ]
        return step**2 / 8 * float(sum(np.linalg.norm(size) for size in sizes))


@dataclass(frozen=True, eq=False)
class Rescaling:
    """Neuron i goes along (aᵢe^{ℓᵢt}, wᵢe^{−ℓᵢt}): its function does not change.

    Attributes:
        start: (a, W).
        logs: ℓ, shape [m].
    """

    start: Network
    logs: Floats

    @property
    def end(self) -> Network:
        """At t = 1."""
        a, w = self.at(np.ones(1))
        return Network(a[0], w[0])

    def at(self, times: Floats) -> tuple[Floats, Floats]:
        """See `Piece`."""
        factors = np.exp(times[:, None] * self.logs)
        return factors * self.start.outer, self.start.inner / factors[:, :, None]

    def deviation(self, points: Floats, step: float) -> Floats:
        """See `Piece`: 0."""
        del step
        return np.zeros(len(points))

    def norm_deviation(self, ball: Ball, step: float) -> float:
        """See `Piece`: 0 for the largest entry, each of which is convex in t."""
        if ball == "max":
            return 0.0
        end = self.end
        largest = [
            np.maximum(np.abs(self.start.outer), np.abs(end.outer))[:, None],
            np.maximum(np.abs(self.start.inner), np.abs(end.inner)),
        ]
        return (
            step**2
            / 8
            * float(np.linalg.norm(self.logs[:, None] ** 2 * np.concatenate(largest, axis=1)))
        )


def line(start: Network, end: Network) -> Blend:
    """The straight line."""
    return Blend(start, end, np.zeros(start.width))
