"""Merge heuristics as points of a projection: the coefficients with which they scale task vectors.

Every method here is Δ = Σ_k d⁽ᵏ⁾ ∘ τ_k with coefficients d⁽ᵏ⁾ entry by entry, so that its J stands beside
the least J of any basis that contains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.methods.sparsify import bernoulli
from isthmus.projection.objective import stacked


@dataclass(frozen=True, eq=False)
class Heuristic:
    """A merge of task vectors without calibration.

    Attributes:
        name: Of the method.
        coefficients: d⁽ᵏ⁾, of a shape that broadcasts to [K, m, n].
        correction: Δ, shape [m, n], float64.
    """

    name: str
    coefficients: Tensor
    correction: Tensor


def task_arithmetic(task_vectors: Tensor, weights: Sequence[float] | float = 1.0) -> Heuristic:
    """Σ_k λ_k τ_k (Ilharco et al. 2023, arXiv 2212.04089, section 2).

    Args:
        task_vectors: Shape [K, m, n].
        weights: λ_k, or one λ for all.
    """
    tau = stacked(task_vectors)
    return _heuristic("task arithmetic", tau, _weights(weights, tau).reshape(-1, 1, 1))


def soup(task_vectors: Tensor, weights: Sequence[float] | float = 1.0) -> Heuristic:
    """The weighted mean of the experts: Σ_k w_k τ_k / Σ_k w_k (Wortsman et al. 2022, arXiv 2203.05482).

    Args:
        task_vectors: Shape [K, m, n].
        weights: w_k; equal if one number.

    Raises:
        MethodError: The weights sum to zero.
    """
    tau = stacked(task_vectors)
    w = _weights(weights, tau)
    if not w.sum():
        raise MethodError("soup: the weights sum to zero", "change a weight")
    return _heuristic("soup", tau, (w / w.sum()).reshape(-1, 1, 1))


def ties(
    task_vectors: Tensor,
    *,
    density: float = 0.2,
    weights: Sequence[float] | float = 1.0,
    scale: float = 1.0,
) -> Heuristic:
    """Trim, elect a sign, take the mean of those that agree (Yadav et al. 2023, arXiv 2306.01708, section 4).

    Args:
        task_vectors: Shape [K, m, n].
        density: Share of each task vector that stays, in (0, 1].
        weights: w_k, not negative and not all zero: of the election and the mean.
        scale: λ.

    Raises:
        MethodError: A density or weights out of range.
    """
    tau = stacked(task_vectors)
    w = _weights(weights, tau)
    if not (w >= 0).all() or not w.any():
        raise MethodError(
            "ties: weights that are negative, or all zero",
            "give weights of at least 0, and not all 0",
        )
    weighted = w.reshape(-1, 1, 1) * tau * _kept(tau, density)
    elected = torch.where(weighted.sum(dim=0) >= 0, 1.0, -1.0)
    shares = w.reshape(-1, 1, 1) * (weighted * elected > 0)
    total = shares.sum(dim=0)
    return _heuristic("TIES", tau, scale * shares / torch.where(total > 0, total, 1.0))


def dare(
    task_vectors: Tensor,
    seeds: Sequence[int],
    *,
    density: float = 0.5,
    weights: Sequence[float] | float = 1.0,
) -> Heuristic:
    """Drop entries at random, divide the others by the density, add up (Yu et al. 2023, arXiv 2311.03099, section 3.2).

    Args:
        task_vectors: Shape [K, m, n].
        seeds: One number below 2**128 for each expert.
        density: Probability to stay, in (0, 1].
        weights: λ_k, or one λ for all.

    Raises:
        MethodError: A density, weights or seeds out of range.
    """
    tau = stacked(task_vectors)
    _share(density)
    if len(seeds) != len(tau):
        raise MethodError(f"dare: {len(seeds)} seeds for {len(tau)} experts", "give one for each")
    size = tau[0].numel()
    masks = torch.stack([torch.from_numpy(bernoulli(seed, 0, size, density)) for seed in seeds])
    kept = masks.reshape(tau.shape).to(tau)
    return _heuristic("DARE", tau, _weights(weights, tau).reshape(-1, 1, 1) * kept / density)


def _heuristic(name: str, tau: Tensor, coefficients: Tensor) -> Heuristic:
    return Heuristic(name, coefficients, (coefficients * tau).sum(dim=0))


def _weights(weights: Sequence[float] | float, tau: Tensor) -> Tensor:
    listed = [weights] * len(tau) if isinstance(weights, int | float) else list(weights)
    w = tau.new_tensor(listed)
    if len(w) != len(tau) or not torch.isfinite(w).all():
        raise MethodError(f"weights {listed} for {len(tau)} experts", "give each a finite weight")
    return w


def _share(density: float) -> None:
    if not 0 < density <= 1:
        raise MethodError(f"a density of {density}", "give a share above 0, at most 1")


def _kept(tau: Tensor, density: float) -> Tensor:
    """Which entries are among the largest of their task vector, all that tie with the last included."""
    _share(density)
    magnitudes = tau.abs().reshape(len(tau), -1)
    if not magnitudes.shape[1]:
        return tau.to(torch.bool)
    rank = max(1, int(density * magnitudes.shape[1]))
    threshold = magnitudes.kthvalue(magnitudes.shape[1] - rank + 1, dim=1).values
    return tau.abs() >= threshold.reshape(-1, 1, 1)
