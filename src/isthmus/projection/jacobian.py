"""The network-output objective, matrix-free: J(d) = Σ_j ‖A_j d + b_j‖² by products with Jacobians.

A_j is the Jacobian of the network's outputs on batch j with respect to all coefficients; it is never formed. A
Jacobian-vector and a vector-Jacobian product for each batch give a product with A = Σ A_jᵀA_j.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.projection.quadratic import Quadratic


class JacobianPair(NamedTuple):
    """One batch of calibration examples.

    Attributes:
        forward: d → A_j d, from shape [D] to the shape of the outputs.
        adjoint: r → A_jᵀ r, from the shape of the outputs to [D].
        residual: b_j, outputs at d = 0 minus their targets.
    """

    forward: Callable[[Tensor], Tensor]
    adjoint: Callable[[Tensor], Tensor]
    residual: Tensor


def linearized(
    outputs: Callable[[Tensor], Tensor], target: Tensor, dimension: int, dtype: torch.dtype
) -> JacobianPair:
    """The products with the Jacobian of a function at d = 0, by torch.func.

    Args:
        outputs: d → the network's outputs on one batch with Δ(d) added to its weights, from shape [D],
            differentiable; give the coefficients of several layers as parts of one d.
        target: The outputs that it should have, of the same shape.
        dimension: D.
        dtype: In which the network computes.

    Raises:
        MethodError: Outputs and target of different shapes, NaN or infinity.
    """
    zero = torch.zeros(dimension, dtype=dtype, device=target.device)
    pulled = torch.func.vjp(outputs, zero)
    at_zero, pull = pulled[0], pulled[1]
    if at_zero.shape != target.shape:
        raise MethodError(
            f"outputs of shape {list(at_zero.shape)} and targets of shape {list(target.shape)}",
            "compare the base with the expert on the same examples",
        )
    residual = (at_zero - target).to(torch.float64)
    if not torch.isfinite(residual).all():
        raise MethodError("NaN or infinity among the outputs", "run the model in higher precision")

    def forward(d: Tensor) -> Tensor:
        pushed = torch.func.jvp(outputs, (zero,), (d.to(dtype),))
        image: Tensor = pushed[1].to(torch.float64)
        return image

    def adjoint(r: Tensor) -> Tensor:
        (back,) = pull(r.to(dtype))
        gradient: Tensor = back.to(torch.float64)
        return gradient

    return JacobianPair(forward, adjoint, residual.detach())


class JacobianQuadratic(Quadratic):
    """J over all batches, one block of D unknowns.

    Args:
        batches: Pairs, gone through once for every product with A. An object whose iterator builds them
            anew each time keeps one batch in memory.
        diagonal: The diagonal of A, shape [D], where it is known: then a ridge can be a share of it.

    Raises:
        MethodError: No batches.
    """

    def __init__(
        self,
        batches: Iterable[JacobianPair],
        diagonal: Tensor | None = None,
    ) -> None:
        self.batches = batches
        linear: Tensor | None = None
        constant = 0.0
        for batch in batches:
            part = batch.adjoint(batch.residual)
            linear = part if linear is None else linear + part
            constant += float(batch.residual.square().sum())
        if linear is None:
            raise MethodError("projection: no calibration batches", "give at least one")
        self.linear = linear.unsqueeze(0)
        self.constant = linear.new_tensor([constant])
        self._diagonal = diagonal

    def product(self, d: Tensor) -> Tensor:
        """Σ_j A_jᵀA_j d, shape [1, D]."""
        total = torch.zeros_like(d)
        for batch in self.batches:
            total = total + batch.adjoint(batch.forward(d[0])).unsqueeze(0)
        return total

    def diagonal(self) -> Tensor | None:
        """The diagonal of A, if it was given."""
        return None if self._diagonal is None else self._diagonal.unsqueeze(0)
