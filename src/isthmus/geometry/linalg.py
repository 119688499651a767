"""Matrix functions that torch does not have: polar factor, logarithm of a rotation, f(symmetric)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_SQUARE_ROOTS = 3
_ARCSINE_TERMS = 20


def sym(a: Tensor) -> Tensor:
    """Symmetric part ½(A + Aᵀ), shape [..., n, n]."""
    return (a + a.mT) / 2


def skew(a: Tensor) -> Tensor:
    """Skew-symmetric part ½(A − Aᵀ), shape [..., n, n]."""
    return (a - a.mT) / 2


def polar(a: Tensor) -> Tensor:
    """The orthonormal factor W of A = WH, H ⪰ 0: the point of the Stiefel manifold next to A.

    Args:
        a: Shape [..., n, p] with n ≥ p. If A is rank-deficient the factor is not unique; one is
            returned.

    Returns:
        Shape [..., n, p].
    """
    left, _, right = torch.linalg.svd(a, full_matrices=False)
    return left @ right


def spectral(s: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """W f(Λ) Wᵀ for the symmetric S = W Λ Wᵀ, shape [..., n, n]."""
    values, vectors = torch.linalg.eigh(s)
    return (vectors * function(values).unsqueeze(-2)) @ vectors.mT


def rotation_log(v: Tensor) -> Tensor:
    """The principal logarithm of a rotation, a skew-symmetric matrix.

    Square roots V^{1/2} = polar(I + V) bring every angle below π/8; there log W = arsinh K with the
    skew part K = ½(W − Wᵀ), a power series. Where V has the eigenvalue −1 the principal logarithm
    does not exist, and what comes back is skew but no logarithm: compare its exponential with V.

    Args:
        v: Shape [..., n, n], orthogonal with determinant 1.

    Returns:
        Shape [..., n, n].
    """
    identity = torch.eye(v.shape[-1], dtype=v.dtype, device=v.device)
    for _ in range(_SQUARE_ROOTS):
        v = polar(identity + v)
    k = skew(v)
    square = k @ k
    series = torch.zeros_like(k)
    for j in reversed(range(_ARCSINE_TERMS)):
        coefficient = (-1) ** j * math.comb(2 * j, j) / (4**j * (2 * j + 1))
        series = series @ square + coefficient * identity
    return 2**_SQUARE_ROOTS * skew(k @ series)


def complement(x: Tensor, y: Tensor) -> Tensor:
    """Orthonormal Q, orthogonal to X, such that the columns of [X, Q] span those of Y.

    One Householder factorisation of [X, Y] gives it whatever the rank of Y − XXᵀY: Q stays
    orthogonal to X where a factorisation of that difference would not.

    Args:
        x: Shape [..., n, p], orthonormal columns.
        y: Shape [..., n, p].

    Returns:
        Shape [..., n, min(p, n − p)].
    """
    p = x.shape[-1]
    return torch.linalg.qr(torch.cat([x, y], dim=-1)).Q[..., p:]


def frobenius(a: Tensor) -> Tensor:
    """Frobenius norm of the last two dimensions."""
    return torch.linalg.matrix_norm(a)


def trace_product(a: Tensor, b: Tensor) -> Tensor:
    """Tr AᵀB over the last two dimensions."""
    return (a * b).sum(dim=(-2, -1))
