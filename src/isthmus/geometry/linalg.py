"""Matrix functions that torch does not have: polar factor, logarithm of a rotation, f(symmetric)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread of torch: on small matrices more gain nothing, and on a busy machine lose tenfold."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def computed(function: Callable[[], T]) -> T | None:
    """What it returns; None where a decomposition meets infinity, NaN or a singular matrix."""
    try:
        return function()
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None


def broadcast(*arrays: Tensor) -> tuple[Tensor, ...]:
    """The arrays expanded to their common shape."""
    return tuple(torch.broadcast_tensors(*arrays))  # type: ignore[no-untyped-call]


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
    factor: Tensor = left @ right
    return factor


def spectral(s: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """W f(Λ) Wᵀ for the symmetric S = W Λ Wᵀ, shape [..., n, n]."""
    values, vectors = torch.linalg.eigh(s)
    image: Tensor = (vectors * function(values).unsqueeze(-2)) @ vectors.mT
    return image


def rotation_exp(a: Tensor) -> Tensor:
    """The exponential of a skew-symmetric matrix, a rotation.

    A² is symmetric with eigenvalues −θ², and exp A = cos Θ + A sin Θ / Θ with Θ² = −A²: one symmetric
    eigenproblem. (`torch.matrix_exp` of torch 2.13 errs by 8e-11 in float64 at norms around 0.04.)

    Args:
        a: Shape [..., n, n], skew-symmetric.

    Returns:
        Shape [..., n, n].
    """
    squares, basis = torch.linalg.eigh(sym(a @ a))
    angles = (-squares).clamp(min=0).sqrt().unsqueeze(-2)
    cosines = (basis * angles.cos()) @ basis.mT
    rotation: Tensor = cosines + a @ ((basis * torch.sinc(angles / math.pi)) @ basis.mT)
    return rotation


def rotation_log(v: Tensor) -> Tensor:
    """The principal logarithm of a rotation, a skew-symmetric matrix.

    V splits into C = sym V and K = skew V, which commute. In a plane that V turns by θ they are cos θ
    and sin θ times the quarter turn, hence log V = K f(C) with f(cos θ) = θ / sin θ: one symmetric
    eigenproblem. Where V has the eigenvalue −1 the principal logarithm does not exist, and what comes
    back is skew but no logarithm: compare its exponential with V.

    Args:
        v: Shape [..., n, n], orthogonal with determinant 1.

    Returns:
        Shape [..., n, n].
    """
    return skew(skew(v) @ spectral(sym(v), _angle_over_sine))


def _angle_over_sine(cosine: Tensor) -> Tensor:
    """θ / sin θ, through the half angle, which keeps its digits at θ = 0; bounded at θ = π."""
    epsilon = torch.finfo(cosine.dtype).eps
    half_sine = ((1 - cosine) / 2).clamp(min=epsilon).sqrt()
    half_cosine = ((1 + cosine) / 2).clamp(min=epsilon).sqrt()
    return torch.atan2(half_sine, half_cosine) / (half_sine * half_cosine)


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
    q: Tensor = torch.linalg.qr(torch.cat([x, y], dim=-1)).Q[..., p:]
    return q


def frobenius(a: Tensor) -> Tensor:
    """Frobenius norm of the last two dimensions."""
    norm: Tensor = torch.linalg.matrix_norm(a)
    return norm


def trace_product(a: Tensor, b: Tensor) -> Tensor:
    """Tr AᵀB over the last two dimensions."""
    return (a * b).sum(dim=(-2, -1))
