"""The gradient of a norm: sign, polar factor, unit vector."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from isthmus.errors import TrainingError

Norm: TypeAlias = Literal["l1", "nuclear", "frobenius"]
NORMS: tuple[Norm, ...] = get_args(Norm)

Polar: TypeAlias = Literal["svd", "newton_schulz"]
POLARS: tuple[Polar, ...] = get_args(Polar)

Adjust: TypeAlias = Literal["none", "original", "match_rms"]
ADJUSTS: tuple[Adjust, ...] = get_args(Adjust)

_QUINTIC = (3.4445, -4.775, 2.0315)
"""Jordan's coefficients for x ← ax + bx³ + cx⁵, steepest at 0 rather than convergent at 1."""

_TINY = 1e-7


def sign(x: Tensor) -> Tensor:
    """∇‖x‖₁, entry by entry; 0 at 0, the subgradient of least norm."""
    return _unless_finite(x, x.sign())


def unit(x: Tensor) -> Tensor:
    """∇‖x‖_F = x/‖x‖_F over all entries; 0 at 0."""
    length = torch.linalg.vector_norm(x)
    return _unless_finite(x, x / torch.where(length > 0, length, 1))


def polar_factor(
    x: Tensor, method: Polar = "svd", steps: int = 5, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """∇‖X‖_* = UVᵀ for X = USVᵀ.

    Args:
        x: Shape [m, n].
        method: `svd` is exact: singular values below max(m, n)·ε·σ₁ count as 0 and give 0, so that this is
            the subgradient of least norm. `newton_schulz` is fast on GPUs and leaves singular values
            between about 0.7 and 1.2 where those of X are not small, and less where they are.
        steps: Of Newton–Schulz.
        dtype: In which Newton–Schulz computes, and of what it returns.

    Returns:
        Shape [m, n]; all NaN where X holds NaN or infinity.
    """
    if method == "newton_schulz":
        return _newton_schulz(x, steps, dtype)
    # LAPACK refuses NaN, some of CUDA's routines return numbers for it.
    finite = torch.where(x.isfinite(), x, 0)
    left, values, right = torch.linalg.svd(finite, full_matrices=False)
    least = max(x.shape) * torch.finfo(x.dtype).eps * values[..., :1]
    return _unless_finite(x, (left * (values > least)) @ right)


def _newton_schulz(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    a, b, c = _QUINTIC
    tall = x.shape[0] > x.shape[1]
    y = x.to(dtype)
    y = y.mT if tall else y
    y = y / y.norm().clamp(min=_TINY)
    for _ in range(steps):
        gram = y @ y.mT
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y


def _unless_finite(x: Tensor, gradient: Tensor) -> Tensor:
    # torch's sign(NaN) is 0: a parameter would stand still for ever, and nobody would know.
    return torch.where(x.isfinite().all(), gradient, math.nan)


def update_scale(shape: Sequence[int], adjust: Adjust) -> float:
    """The factor s of a polar update for a matrix of shape [rows, columns].

    `original`: √max(1, rows/columns) (Jordan's Muon); `match_rms`: 0.2·√max(rows, columns), about the root
    mean square of AdamW's updates (Liu et al. 2025, arXiv 2502.16982); `none`: 1.
    """
    rows, columns = shape
    if adjust == "original":
        return math.sqrt(max(1, rows / columns))
    if adjust == "match_rms":
        return 0.2 * math.sqrt(max(rows, columns))
    return 1.0


def matrix_blocks(
    tensor: Tensor, transposed: bool = False, split: Sequence[int] | None = None
) -> list[Tensor]:
    """The matrices that a parameter consists of, as views of shape [rows, ...].

    Flattened to [rows, columns] each is a linear map to `rows` outputs.

    Args:
        tensor: Shape [out, in] or [out, in, *kernel].
        transposed: It has shape [in, out, ...], as in transformers' Conv1D.
        split: The outputs of matrices that share the tensor, such as queries, keys and values.

    Raises:
        TrainingError: fewer than two dimensions, or a split that does not add up.
    """
    if tensor.ndim < 2:
        raise TrainingError(
            f"a tensor of shape {list(tensor.shape)} is no matrix",
            'give biases and gains to a group with norm="l1" (`parameter_groups` sorts them)',
        )
    rows = tensor.transpose(0, 1) if transposed else tensor
    if split is None:
        return [rows]
    if sum(split) != len(rows) or min(split) < 1:
        raise TrainingError(
            f"a tensor of shape {list(tensor.shape)} has {len(rows)} outputs, which do not split into "
            f"{list(split)}",
            "the parts of `split` must be positive and add up to the outputs",
        )
    return list(torch.split(rows, list(split)))
