"""How alike two networks' features are."""

from __future__ import annotations

from torch import Tensor

from isthmus.errors import PathError


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Linear centred kernel alignment (Kornblith et al. 2019, arXiv 1905.00414), 0 to 1.

    ‖YᵀX‖²/(‖XᵀX‖‖YᵀY‖) in Frobenius norms, columns centred. It is 1 if one is the other after a rotation and
    a scaling.

    Args:
        x: Features of one network, shape [examples, units], in any dtype; computed in float64.
        y: Of another network for the same examples, shape [examples, its units].

    Raises:
        PathError: Other numbers of examples, or features that are the same for all examples.
    """
    if x.ndim != 2 or y.ndim != 2 or len(x) != len(y):
        raise PathError(
            f"Features have the shapes {list(x.shape)} and {list(y.shape)}",
            "Give [examples, units] of the same examples.",
        )
    x, y = (each.double() - each.double().mean(dim=0) for each in (x, y))
    own = (x.T @ x).norm() * (y.T @ y).norm()
    if not own > 0:
        raise PathError(
            "Features are the same for every example, and alike to nothing",
            "Take more examples, or a layer that tells them apart.",
        )
    return float((y.T @ x).norm() ** 2 / own)
