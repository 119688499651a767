"""Σ w_k ρ(d(μ, x_k)) as a function of μ and of every x_k's gauge, in moving frames."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.geometry.fixed_rank import FixedRank, Polar
from isthmus.geometry.linalg import computed, frobenius, polar, rotation_exp, skew, spectral, sym
from isthmus.geometry.procrustes import rotations
from isthmus.geometry.quotient import HORIZONTAL, Quotient
from isthmus.geometry.stiefel import (
    CONVERGED,
    INJECTIVITY_RADIUS,
    Stiefel,
    complete,
    preprocess,
    rotation_generator,
)

Rho = Callable[[Tensor], tuple[Tensor, Tensor]]

FINEST = 1e-14
"""Accuracy of logarithms near rounding; see `Stiefel.turned`."""

SAME = 1e-12
"""A distance that counts as none."""

_SMALLEST_FACTOR = 1e-3


class Move(NamedTuple):
    """A tangent vector or a gradient at (μ, O_1, …, O_K).

    Attributes:
        a: Uᵀ and Vᵀ times the moves of the frames, skew, shape [2, r, r].
        b: Those moves in the other directions of the moving frames, shape [2, s − r, r].
        core: The move of B = LLᵀ, whitened by L, symmetric, shape [r, r].
        gauges: Ω_k of O_k ↦ O_k exp(−Ω_k), skew, shape [K, r, r].
    """

    a: Tensor
    b: Tensor
    core: Tensor
    gauges: Tensor

    def flat(self) -> Tensor:
        """One vector. A is divided by √2, so that dot products of moves of μ are inner products."""
        return torch.cat([(self.a / math.sqrt(2)).flatten(), *map(torch.flatten, self[1:])])

    @classmethod
    def of(cls, flat: Tensor, rank: int, count: int) -> Move:
        """The inverse of `flat`."""
        square = rank * rank
        rest = flat.numel() - (3 + count) * square
        ends = [2 * square, 2 * square + rest, 3 * square + rest]
        a, b, core, gauges = torch.tensor_split(flat, ends)
        return cls(
            math.sqrt(2) * a.reshape(2, rank, rank),
            b.reshape(2, -1, rank),
            core.reshape(rank, rank),
            gauges.reshape(count, rank, rank),
        )


class FlatHessian:
    """The Hessian of Σ ½f_k d² where space is flat: f = Σ f_k for μ, f_k times the orbits' metric.

    Args:
        factors: f_k, shape [K].
        root: L with B = LLᵀ, shape [r, r].
    """

    def __init__(self, factors: Tensor, root: Tensor) -> None:
        self.root, self.inverse = root, torch.linalg.inv(root)
        self.spectrum, self.basis = torch.linalg.eigh(sym(root @ root.mT))
        self.stiffness = float(factors.sum()) or 1.0
        self.gauges = factors.clamp(min=_SMALLEST_FACTOR * self.stiffness).reshape(-1, 1, 1)

    def vertical(self, a: Tensor, core: Tensor) -> Tensor:
        """How far a tangent vector t points along the orbit: N with ⟨t, vertical Ω⟩ = ⟨N, Ω⟩."""
        turned = self.root @ core @ self.inverse
        against: Tensor = (a[0] + a[1]) / 2 + turned - turned.mT
        return against

    def upright(self, covector: Tensor) -> Tensor:
        """The Ω with ⟨vertical(Ω), vertical(Ψ)⟩ = ⟨N, Ψ⟩ for all skew Ψ; see `FixedRank.gauge`."""
        ratio = self.spectrum.unsqueeze(-1) / self.spectrum.unsqueeze(-2)
        inside = (self.basis.mT @ covector @ self.basis) / (ratio + 1 / ratio - 1)
        return skew(self.basis @ inside @ self.basis.mT)

    def solve(self, gradient: Move) -> Move:
        """Newton's step, −1 times: μ moves horizontally, each gauge on its own."""
        a, b, core, gauges = gradient
        omega = self.upright(self.vertical(a, core))
        turned = self.root.mT @ omega @ self.inverse.mT
        return Move(
            (a - omega) / self.stiffness,
            b / self.stiffness,
            (core - turned - turned.mT) / self.stiffness,
            self.upright(gauges) / self.gauges,
        )


@dataclass(frozen=True)
class Place:
    """μ and the gauges, and what the sum is there.

    Attributes:
        frames: Orthogonal matrices that begin with U and with V, shape [2, s, s].
        root: L with B = LLᵀ, shape [r, r].
        turns: O_k, shape [K, r, r].
        completions: Columns by which the logarithms completed each turned frame, [2, K, s, q].
        value: The sum; infinite where a logarithm was not found or not finite.
        gradient: Its gradient.
        gradient_norm: Length of the gradient; at a point itself, of what the others pull beyond its
            own weight (Vardi and Zhang 2000, The multivariate L1-median).
        held: What a point on which μ lies holds back.
        pull: The larger of 1 and Σ w_k ρ′(d_k).
        hessian: In flat space.
        distances: d(μ, x_k·O_k), shape [K].
        certified: Horizontal, and both frames nearer than the injectivity radius, shape [K].
        found: Every logarithm was found, and is finite.
    """

    frames: Tensor
    root: Tensor
    turns: Tensor
    completions: Tensor
    value: float
    gradient: Move
    gradient_norm: float
    held: float
    pull: float
    hessian: FlatHessian
    distances: Tensor
    certified: Tensor
    found: bool

    @property
    def mean(self) -> Polar:
        """μ."""
        u, v = polar(self.frames[..., : len(self.root)])
        return Polar(u, sym(self.root @ self.root.mT), v)


class AlignedSum:
    """Σ w_k ρ(d(μ, x_k·O_k)) with the distance of `FixedRank`.

    Args:
        points: K points, stacked, both frames with the same number s of rows, above r.
        weights: Shape [K], positive, of sum 1.
        rho: A loss of `frechet.py`.
    """

    def __init__(self, points: Polar, weights: Tensor, rho: Rho) -> None:
        self.points = points
        self.weights = weights
        self.rho = rho
        self.frames = torch.stack([points.u, points.v])
        _, self.count, self.rows, self.rank = self.frames.shape
        self.stiefel = Stiefel(self.rows, self.rank)

    def at_point(self, x: Polar) -> Place:
        """At a point, every x_k in the gauge that Procrustes alignment gives it."""
        frames = complete(torch.stack([x.u, x.v]))
        turns = rotations(x, self.points)[0]
        return self._at(frames, torch.linalg.cholesky(x.b), turns, None, FINEST)

    def realigned(self, place: Place) -> Place:
        """At the same μ, every gauge and every logarithm searched afresh."""
        mean = place.mean
        quotient = Quotient(FixedRank(self.rows, self.rows, self.rank))
        log = quotient._logarithm(mean, self.points)
        aligned = quotient.total._exp(mean, log.tangent)
        shorter = log.converged & (log.length < place.distances - SAME)
        turns = torch.where(
            shorter.reshape(-1, 1, 1), rotations(aligned, self.points)[0], place.turns
        )
        return self._at(place.frames, place.root, turns, None, FINEST)

    def moved(self, place: Place, step: Move, accuracy: float) -> Place | None:
        """One step further: geodesics for μ, one-parameter groups for the gauges.

        The frames move by left translation, so that coordinates in them keep inner products.

        Returns:
            None where the step is so long that numbers overflow or a core becomes singular.
        """
        if not torch.isfinite(step.flat()).all():
            return None
        return computed(lambda: self._moved(place, step, accuracy))

    def _moved(self, place: Place, step: Move, accuracy: float) -> Place:
        r, frames = self.rank, place.frames
        q, below = torch.linalg.qr(step.b)
        turn = rotation_exp(rotation_generator(skew(step.a), below))
        turn = turn - torch.eye(turn.shape[-1], dtype=turn.dtype)
        change = torch.cat([frames[..., :r], frames[..., r:] @ q], dim=-1) @ turn
        return self._at(
            frames + torch.cat([change[..., :r], change[..., r:] @ q.mT], dim=-1),
            place.root @ spectral(sym(step.core) / 2, torch.exp),
            place.turns @ rotation_exp(-skew(step.gauges)),
            place.completions,
            accuracy,
        )

    def _at(
        self,
        frames: Tensor,
        root: Tensor,
        turns: Tensor,
        completions: Tensor | None,
        accuracy: float,
    ) -> Place:
        a, b, completions, found = self._frame_logarithms(frames, turns, completions, accuracy)
        core = self._core_logarithms(root, turns)
        of_frames = a.square().sum(dim=(-2, -1)) / 2 + b.square().sum(dim=(-2, -1))
        distances = (of_frames.sum(dim=0) + core.square().sum(dim=(-2, -1))).sqrt()
        found = found and bool(torch.isfinite(distances).all())
        value, slope = self.rho(distances)
        here = distances <= SAME
        pull = self.weights * slope
        factors = torch.where(here, 0.0, pull / torch.where(here, 1.0, distances))
        hessian = FlatHessian(factors, root)
        vertical = hessian.vertical(a, core)
        share = -factors.reshape(-1, 1, 1)
        gradient = Move(
            (share * a).sum(dim=1), (share * b).sum(dim=1), (share * core).sum(0), share * vertical
        )
        squared = float(gradient.flat() @ hessian.solve(gradient).flat()) * hessian.stiffness
        held = float(pull[here].sum())
        level = frobenius(hessian.upright(vertical)) <= HORIZONTAL
        near = (of_frames < INJECTIVITY_RADIUS**2).all(dim=0)
        return Place(
            frames=frames,
            root=root,
            turns=turns,
            completions=completions,
            value=float(self.weights @ value) if found else math.inf,
            gradient=gradient,
            gradient_norm=max(0.0, math.sqrt(max(0.0, squared)) - held) if found else math.inf,
            held=held,
            pull=max(1.0, float(pull.sum())),
            hessian=hessian,
            distances=distances if found else torch.full_like(distances, math.inf),
            certified=level & near & found,
            found=found,
        )

    def _frame_logarithms(
        self, frames: Tensor, turns: Tensor, completions: Tensor | None, accuracy: float
    ) -> tuple[Tensor, Tensor, Tensor, bool]:
        """A and B of every logarithm, shapes [2, K, r, r] and [2, K, s − r, r]; completions; success.

        From the completions of a place nearby few steps are left, and the same geodesic is found
        again where there are several.
        """
        r = self.rank
        back = frames.mT.unsqueeze(1)
        seen = back @ (self.frames @ turns)
        q, below = torch.linalg.qr(seen[..., r:, :])
        v = complete(torch.cat([seen[..., :r, :], below], dim=-2))
        if completions is None:
            q, v = preprocess(q, v, r)
        else:
            last = back @ completions
            last = torch.cat([last[..., :r, :], q.mT @ last[..., r:, :]], dim=-2)
            free = v[..., r:]
            free = free @ polar(free.mT @ last)
            v = torch.cat([v[..., :r], free], dim=-1)
            signs = torch.where(torch.linalg.det(v) < 0, -1.0, 1.0)
            v[..., -1] *= signs.unsqueeze(-1)
        v = v.contiguous()
        a, b, residual, _ = self.stiefel.turned(v, accuracy)
        allowed = max(CONVERGED * math.sqrt(r), 10 * accuracy * v.shape[-1])
        added = torch.cat([v[..., :r, r:], q @ v[..., r:, r:]], dim=-2)
        return a, q @ b, frames.unsqueeze(1) @ added, bool((residual <= allowed).all())

    def _core_logarithms(self, root: Tensor, turns: Tensor) -> Tensor:
        """Log L⁻¹ O_kᵀB_kO_k L⁻ᵀ, shape [K, r, r]."""
        half = torch.linalg.solve(root, turns.mT @ self.points.b @ turns)
        return spectral(sym(torch.linalg.solve(root, half.mT)), torch.log)
