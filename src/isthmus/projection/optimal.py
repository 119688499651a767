"""The optimal basis: which few output directions hold most of the error.

With S = Σ bbᵀ over the calibration residuals b and U of r orthonormal columns, coefficients that every
example chooses for itself remove tr UᵀSU of the error tr S = J(0). The best U are the leading eigenvectors of
S, and no correction of rank r captures more, since its outputs lie in r directions. A weight cannot choose by
example: Δ = UM gives example x the coefficients Mx, which is reduced-rank regression.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.projection.objective import LayerObjective, stacked, task_weights
from isthmus.projection.statistics import InputMoments, TargetMoments


@dataclass(frozen=True, eq=False)
class ErrorSpectrum:
    """Eigenvalues and leading eigenvectors of S.

    Attributes:
        values: λ_1 ≥ λ_2 ≥ ..., shape [r].
        directions: Their eigenvectors, shape [m, r].
        total: tr S = J(0).
    """

    values: Tensor
    directions: Tensor
    total: float

    @classmethod
    def of_outer(cls, outer: Tensor) -> ErrorSpectrum:
        """From S, shape [m, m]."""
        values, vectors = torch.linalg.eigh((outer + outer.mT) / 2)
        return cls(values.flip(0).clamp(min=0), vectors.flip(1), float(outer.trace()))

    @classmethod
    def of_factor(cls, factor: Tensor) -> ErrorSpectrum:
        """From Z with S = ZZᵀ, shape [m, s]."""
        directions, roots, _ = torch.linalg.svd(factor, full_matrices=False)
        return cls(roots.square(), directions, float(factor.square().sum()))

    def captured(self, rank: int) -> float:
        """Σ_{i≤r} λ_i / tr S: the upper bound of the captured energy of corrections of that rank."""
        if rank < 0:
            raise MethodError(f"a rank of {rank}", "give 0 or more output directions")
        return float(self.values[:rank].sum()) / self.total if self.total > 0 else 1.0

    def leading(self, rank: int) -> Tensor:
        """U, shape [m, r]."""
        if not 1 <= rank <= self.directions.shape[1]:
            raise MethodError(
                f"{rank} of {self.directions.shape[1]} output directions",
                "ask for at least one, and for no more than are known",
            )
        return self.directions[:, :rank]


def expert_spectrum(
    targets: Tensor,
    moments: Sequence[InputMoments],
    weights: Sequence[float] | None = None,
) -> ErrorSpectrum:
    """Of S = Σ ω_t τ_t C_t τ_tᵀ, the residuals of `expert_objective` with the same arguments.

    Where the layer has more outputs than the tasks have inputs together, S is not formed: it is ZZᵀ with
    Z = [√ω_t τ_t C_t^½].

    Raises:
        MethodError: Shapes that do not fit, NaN, bad weights.
    """
    tau = stacked(targets)
    omega = task_weights(weights, len(tau))
    if len(moments) != len(tau):
        raise MethodError(
            f"projection: {len(tau)} targets and inputs of {len(moments)} tasks",
            "give each task the task vector of its expert",
        )
    tasks, m, n = tau.shape
    if m <= tasks * n:
        outer = tau.new_zeros(m, m)
        for share, target, moment in zip(omega, tau, moments, strict=True):
            outer += share * (target @ moment.gram @ target.mT)
        return ErrorSpectrum.of_outer(outer)
    parts = []
    for share, target, moment in zip(omega, tau, moments, strict=True):
        values, vectors = torch.linalg.eigh(moment.gram)
        parts.append(target @ (vectors * (share * values.clamp(min=0)).sqrt()))
    return ErrorSpectrum.of_factor(torch.cat(parts, dim=1))


def target_spectrum(moments: TargetMoments, base: Tensor | None) -> ErrorSpectrum:
    """Of the residuals of `target_objective` with the same arguments.

    Raises:
        MethodError: The moments were recorded without the outer products of the targets.
    """
    if moments.squares.ndim != 2:
        raise MethodError(
            "optimal directions: the outer products of the targets were not recorded",
            "record them with TargetMoments.empty(..., outer=True), or add the residuals to a "
            "FrequentDirections",
        )
    if base is None:
        return ErrorSpectrum.of_outer(moments.squares)
    w = base.to(torch.float64)
    mixed = w @ moments.cross.mT
    return ErrorSpectrum.of_outer(w @ moments.gram @ w.mT - mixed - mixed.mT + moments.squares)


@dataclass(frozen=True, eq=False)
class ReducedRank:
    """The best correction of a rank, Δ = UM.

    Attributes:
        directions: U, shape [m, r], orthonormal.
        coefficients: M, shape [r, n].
        captured: Its captured energy, for every rank up to r: shape [r + 1], from rank 0.
    """

    directions: Tensor
    coefficients: Tensor
    captured: Tensor

    @property
    def correction(self) -> Tensor:
        """Δ, shape [m, n]."""
        product: Tensor = self.directions @ self.coefficients
        return product


def reduced_rank(objective: LayerObjective, rank: int) -> ReducedRank:
    """The least J(Δ) over all Δ of at most this rank: reduced-rank regression (Izenman 1975).

    J(Δ) = J(Δ*) + ‖(Δ − Δ*) C^½‖² around the regression Δ* = −G C⁺, so the best is the truncated singular
    value decomposition of Δ* C^½, turned back by C^−½: U from its left vectors, M = UᵀΔ*.

    Args:
        objective: Of the layer.
        rank: At least 1; beyond the rank of Δ* nothing more is captured.

    Raises:
        MethodError: A rank below 1.
    """
    m, n = objective.shape
    if rank < 1:
        raise MethodError(f"a rank of {rank}", "give at least one output direction")
    values, vectors = objective.spectrum
    whitened = -(objective.cross @ vectors) / values.sqrt()
    left, roots, _ = torch.linalg.svd(whitened, full_matrices=False)
    u = left[:, : min(rank, m, n)]
    gains = torch.zeros(u.shape[1] + 1, dtype=torch.float64, device=u.device)
    gains[1:] = roots[: u.shape[1]].square().cumsum(0)
    shares = gains / objective.initial if objective.initial > 0 else torch.ones_like(gains)
    m_coefficients = (u.mT @ whitened / values.sqrt()) @ vectors.mT
    return ReducedRank(u, m_coefficients, shares)
