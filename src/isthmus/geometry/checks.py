"""What an array must satisfy before it is a point of a manifold."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.errors import MethodError


def as_float64(x: object, shape: tuple[int, ...], name: str) -> Tensor:
    """The array in float64, its trailing shape checked and its numbers finite.

    Args:
        x: A floating tensor of shape [..., *shape].
        shape: The trailing shape.
        name: What the array is, for the error.

    Raises:
        MethodError: Not a floating tensor, the wrong shape, NaN or infinity.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        found = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise MethodError(
            f"{name}: expected a floating torch tensor, got {found}",
            "convert it with torch.as_tensor(x, dtype=torch.float64)",
        )
    if x.ndim < len(shape) or tuple(x.shape[x.ndim - len(shape) :]) != shape:
        raise MethodError(
            f"{name}: shape {list(x.shape)} does not end in {list(shape)}",
            "give the manifold the sizes of its points",
        )
    if not torch.isfinite(x).all():
        raise MethodError(
            f"{name}: NaN or infinity among its numbers",
            "leave this expert out, or load its weights again",
        )
    return x.to(torch.float64)


def rounding(x: Tensor) -> float:
    """How far an array of this type may miss a constraint that it means to satisfy."""
    return max(1e-8, 1e3 * torch.finfo(x.dtype).eps)


def require(misfit: Tensor, allowed: float, problem: str, cure: str) -> None:
    """Refuse a point whose constraint is violated by more than rounding.

    Args:
        misfit: By how much, for every point of a batch.
        allowed: How much is rounding.
        problem: What is wrong.
        cure: What to do about it.

    Raises:
        MethodError: Some misfit is larger than allowed.
    """
    worst = float(misfit.max()) if misfit.numel() else 0.0
    if not worst <= allowed:
        raise MethodError(f"{problem} (off by {worst:.1e}, allowed {allowed:.0e})", cure)
