"""The layer-local objective: how far a merged linear layer's outputs are from their targets.

With b = W_0 x − y, the base's output minus the target, and the correction Δ,

J(Δ) = Σ ‖Δx + b‖² = tr ΔCΔᵀ + 2 tr ΔGᵀ + Σ q, C = Σ xxᵀ, G = Σ bxᵀ, q_i = Σ b_i².

So C, G and q are all that a layer's calibration leaves behind, and no output is ever formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.geometry.checks import as_float64
from isthmus.projection.statistics import InputMoments, TargetMoments

SINGULAR = 1e-12
"""Eigenvalues of C below this share of the largest are rounding."""

REGULAR = 1e-8
"""A C whose Cholesky pivots at unit diagonal all exceed this is solved with directly."""


@dataclass(frozen=True, eq=False)
class LayerObjective:
    """J(Δ) of one linear layer.

    Attributes:
        gram: C, shape [n, n], float64.
        cross: G, shape [m, n], float64.
        squares: q, shape [m], float64.
    """

    gram: Tensor
    cross: Tensor
    squares: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Of Δ: [m, n]."""
        m, n = self.cross.shape
        return m, n

    @property
    def initial(self) -> float:
        """J(0)."""
        return float(self.squares.sum())

    def value(self, correction: Tensor) -> float:
        """J(Δ) for Δ of shape [m, n]."""
        if tuple(correction.shape) != self.shape:
            raise MethodError(
                f"a correction of shape {list(correction.shape)} for a layer of shape "
                f"{list(self.shape)}",
                "give a correction of the layer's weight, with its bias as a last column if the "
                "inputs end in a constant",
            )
        delta = correction.to(torch.float64)
        return float((delta * (delta @ self.gram + 2 * self.cross)).sum()) + self.initial

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """The eigenvalues of C that are not rounding, shape [r], and vectors, shape [n, r]."""
        values, vectors = torch.linalg.eigh(self.gram)
        kept = values > SINGULAR * values[-1]
        return values[kept], vectors[:, kept]

    @cached_property
    def _least(self) -> Tensor:
        """−G C⁺; by Cholesky where C is regular, which takes a tenth of the time of the spectrum."""
        diagonal = self.gram.diagonal()
        if bool((diagonal > 0).all()):
            scale = diagonal.rsqrt()
            factor, failed = torch.linalg.cholesky_ex(scale.unsqueeze(1) * self.gram * scale)
            if not failed and float(factor.diagonal().square().min()) > REGULAR:
                solved = torch.cholesky_solve((self.cross * scale).mT, factor).mT
                return -solved * scale
        values, vectors = self.spectrum
        least: Tensor = -((self.cross @ vectors) / values) @ vectors.mT
        return least

    def regression(self) -> Tensor:
        """−G C⁺, shape [m, n]: the least-norm minimiser of J over all matrices."""
        return self._least

    def floor(self) -> float:
        """The least J over all matrices Δ: the error that no weight of this layer removes."""
        # At the minimum ΔC = −G, so that J = tr ΔGᵀ + J(0).
        return max(self.initial + float((self._least * self.cross).sum()), 0.0)


def expert_objective(
    targets: Tensor,
    moments: Sequence[InputMoments],
    weights: Sequence[float] | None = None,
) -> LayerObjective:
    """On the inputs of task t the layer should answer as an expert does: y = (W_0 + τ_t) x.

    Then C = Σ ω_t C_t, G = −Σ ω_t τ_t C_t and q = Σ ω_t diag(τ_t C_t τ_tᵀ).

    Args:
        targets: τ_t, the task vector of the expert of each task, shape [T, m, n]; zero where the base
            itself is the target.
        moments: Of each task's inputs.
        weights: ω_t, non-negative. All 1 if None, so that each input counts alike.

    Raises:
        MethodError: Shapes that do not fit, NaN, bad weights, no calibration inputs at all.
    """
    tau = stacked(targets)
    omega = task_weights(weights, len(tau))
    if len(moments) != len(tau):
        raise MethodError(
            f"projection: {len(tau)} targets and inputs of {len(moments)} tasks",
            "give each task the task vector of its expert",
        )
    m, n = tau.shape[1:]
    gram = tau.new_zeros(n, n)
    cross, squares = tau.new_zeros(m, n), tau.new_zeros(m)
    for share, target, moment in zip(omega, tau, moments, strict=True):
        _same_inputs(moment.gram, n)
        image = share * (target @ moment.gram)
        gram += share * moment.gram
        cross -= image
        squares += (image * target).sum(dim=1)
    _some(sum(moment.count for moment in moments))
    return LayerObjective(gram, cross, squares)


def target_objective(moments: TargetMoments, base: Tensor | None) -> LayerObjective:
    """The layer should answer as the targets that were recorded.

    Args:
        moments: Of inputs and targets.
        base: W_0, shape [m, n]; None if the targets were recorded as y − W_0 x, which keeps more digits
            when the experts are near the base.

    Raises:
        MethodError: Shapes that do not fit, NaN, no calibration inputs at all.
    """
    _some(moments.count)
    squares = moments.squares if moments.squares.ndim == 1 else moments.squares.diagonal()
    if base is None:
        return LayerObjective(moments.gram, -moments.cross, squares)
    w = as_float64(base, tuple(moments.cross.shape), "base weight")
    image = w @ moments.gram
    residual = squares + (w * (image - 2 * moments.cross)).sum(dim=1)
    return LayerObjective(moments.gram, image - moments.cross, residual.clamp(min=0))


def sequential_objective(
    base: Tensor,
    targets: Tensor,
    merged: Sequence[InputMoments],
    cross: Sequence[Tensor],
    own: Sequence[InputMoments],
    weights: Sequence[float] | None = None,
) -> LayerObjective:
    """On the inputs that the merged layers before it produce, the layer should answer as the expert does on its own.

    With x the input of task t in the merged network, x' that in its expert, b = W_0 x − (W_0 + τ_t) x': the
    sequential algorithm of arXiv 2605.29101, where what the layers before got wrong can be mended here.

    Args:
        base: W_0, shape [m, n].
        targets: τ_t, shape [T, m, n].
        merged: Of x, by task.
        cross: Σ x' xᵀ, shape [n, n], by task.
        own: Of x', by task.
        weights: ω_t, non-negative. All 1 if None.

    Raises:
        MethodError: Shapes that do not fit, NaN, bad weights, no calibration inputs at all.
    """
    tau = stacked(targets)
    omega = task_weights(weights, len(tau))
    if not len(tau) == len(merged) == len(cross) == len(own):
        raise MethodError(
            f"projection: {len(tau)} targets, and inputs of {len(merged)}, {len(cross)} and {len(own)} "
            "tasks",
            "give each task the task vector of its expert",
        )
    m, n = tau.shape[1:]
    w = as_float64(base, (m, n), "base weight")
    total = TargetMoments.empty(m, n)
    for share, target, one, mixed, other in zip(omega, tau, merged, cross, own, strict=True):
        _same_inputs(one.gram, n)
        expert = w + target
        total.gram += share * one.gram
        total.cross += share * (expert @ mixed)
        total.squares += share * ((expert @ other.gram) * expert).sum(dim=1)
        total.count += one.count
    return target_objective(total, w)


def stacked(task_vectors: Tensor) -> Tensor:
    """Task vectors [K, m, n] in float64, K ≥ 1 and finite.

    Raises:
        MethodError: Something else.
    """
    if task_vectors.ndim != 3 or not len(task_vectors):
        raise MethodError(
            f"task vectors of shape {list(task_vectors.shape)}, expected [K, m, n] with K ≥ 1",
            "stack the task vectors of one layer's weight",
        )
    return as_float64(task_vectors, (), "task vectors")


def task_weights(weights: Sequence[float] | None, count: int) -> list[float]:
    """One finite, non-negative weight for each task; all 1 if None.

    Raises:
        MethodError: Something else, or all are zero.
    """
    omega = [1.0] * count if weights is None else [float(weight) for weight in weights]
    finite = all(0 <= weight < float("inf") for weight in omega)
    if len(omega) != count or not finite or not any(omega):
        raise MethodError(
            f"projection: weights {omega} for {count} tasks",
            "give one finite, non-negative weight for each task, and not all zero",
        )
    return omega


def _same_inputs(gram: Tensor, n: int) -> None:
    if tuple(gram.shape) != (n, n):
        raise MethodError(
            f"calibration: inputs of size {gram.shape[0]} for weights of {n} columns",
            "record this layer's inputs, with a constant at the end if the weight has a bias column",
        )


def _some(count: int) -> None:
    if not count:
        raise MethodError(
            "projection: no calibration inputs", "add some with InputMoments.add before projecting"
        )
