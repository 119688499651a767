"""RegMean and Fisher merging from the statistics of the projection, so that comparing them costs nothing.

All return corrections Δ of the base's weight, from the experts' task vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.geometry.fisher import diagonal_fisher_mean, kronecker_fisher_mean
from isthmus.projection.objective import expert_objective, stacked, task_weights
from isthmus.projection.statistics import InputMoments


def regmean(
    task_vectors: Tensor,
    moments: Sequence[InputMoments],
    weights: Sequence[float] | None = None,
    *,
    keep: float = 1.0,
) -> Tensor:
    """(Σ ω_k τ_k C_k)(Σ ω_k C_k)⁺: RegMean (Jin et al. 2023, arXiv 2212.09849).

    It minimises the layer-local objective over all weights. Where inputs never vary the answer stays at
    the base.

    Args:
        task_vectors: τ_k, shape [K, m, n].
        moments: Of each expert's inputs.
        weights: ω_k, non-negative. All 1 if None.
        keep: Factor on the entries of C_k off the diagonal, in [0, 1]; the paper takes 0.9 or less.

    Returns:
        Δ, shape [m, n], float64.

    Raises:
        MethodError: Shapes that do not fit, NaN, bad weights, `keep` out of range.
    """
    if not 0 <= keep <= 1:
        raise MethodError(f"regmean: keep={keep}", "give a share between 0 and 1")
    shrunk = [
        InputMoments(keep * one.gram + (1 - keep) * one.gram.diagonal().diag(), one.count)
        for one in moments
    ]
    return expert_objective(task_vectors, shrunk, weights).regression()


def diagonal_fisher(
    task_vectors: Tensor,
    moments: Sequence[InputMoments],
    weights: Sequence[float] | None = None,
    *,
    output_gradients: Sequence[Tensor] | None = None,
) -> Tensor:
    """Fisher merging with F_k = diag(g_k) ⊗ diag(C_k) for a layer y = Wx.

    Args:
        task_vectors: τ_k, shape [K, m, n].
        moments: Of each expert's inputs.
        weights: ω_k, non-negative. All 1 if None.
        output_gradients: Second moments of the loss's gradient with respect to y, shape [m, m] each; the
            identity if None, which is the layer's own squared error.

    Returns:
        Δ, shape [m, n], float64.

    Raises:
        MethodError: As `diagonal_fisher_mean`.
    """
    tau, outputs, omega = _prepared(task_vectors, moments, weights, output_gradients)
    fishers = [
        torch.outer(g.diagonal(), moment.gram.diagonal())
        for g, moment in zip(outputs, moments, strict=True)
    ]
    return diagonal_fisher_mean(list(tau), fishers, omega)


def kronecker_fisher(
    task_vectors: Tensor,
    moments: Sequence[InputMoments],
    weights: Sequence[float] | None = None,
    *,
    output_gradients: Sequence[Tensor] | None = None,
    damping: float = 1e-3,
) -> Tensor:
    """Fisher merging with F_k = G_k ⊗ C_k; with G_k = I and little damping it is RegMean.

    Args:
        task_vectors: τ_k, shape [K, m, n].
        moments: Of each expert's inputs.
        weights: ω_k, non-negative. All 1 if None.
        output_gradients: G_k, shape [m, m] each; the identity if None.
        damping: As of `kronecker_fisher_mean`.

    Returns:
        Δ, shape [m, n], float64.

    Raises:
        MethodError: As `kronecker_fisher_mean`.
    """
    tau, outputs, omega = _prepared(task_vectors, moments, weights, output_gradients)
    grams = [moment.gram for moment in moments]
    return kronecker_fisher_mean(list(tau), outputs, grams, omega, damping=damping)


def _prepared(
    task_vectors: Tensor,
    moments: Sequence[InputMoments],
    weights: Sequence[float] | None,
    output_gradients: Sequence[Tensor] | None,
) -> tuple[Tensor, list[Tensor], list[float]]:
    tau = stacked(task_vectors)
    identity = torch.eye(tau.shape[1], dtype=torch.float64, device=tau.device)
    outputs = [identity] * len(tau) if output_gradients is None else list(output_gradients)
    if not len(tau) == len(moments) == len(outputs):
        raise MethodError(
            f"Fisher merging: {len(tau)} task vectors, inputs of {len(moments)} experts, output "
            f"gradients of {len(outputs)}",
            "give one of each for every expert",
        )
    return tau, outputs, task_weights(weights, len(tau))
