"""The Stiefel manifold of orthonormal frames with the canonical metric."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.geometry.checks import as_float64, require, rounding
from isthmus.geometry.euclidean import random_orthogonal
from isthmus.geometry.linalg import (
    broadcast,
    complement,
    frobenius,
    polar,
    rotation_exp,
    rotation_log,
    skew,
    sym,
    trace_product,
)
from isthmus.geometry.manifold import ArrayManifold, Logarithm

INJECTIVITY_RADIUS = math.sqrt(4 / 5) * math.pi
"""Below this length a geodesic is the only shortest one (Rentmeesters 2013, Algorithms for data
fitting on some common homogeneous spaces); the true radius is at most 0.914π (Absil and
Mataigne 2024, arXiv 2403.02079)."""

CONVERGED = 1e-11
"""Largest residual of a logarithm that counts as found, per square root of its entries' number."""

_STALL = 1e-14
_SLOWEST = -1 / 6


class Stiefel(ArrayManifold):
    """Matrices U of shape [..., n, p] with UᵀU = I.

    The canonical metric ⟨D, E⟩ = tr Dᵀ(I − ½UUᵀ)E is what O(n) induces on O(n)/O(n − p) (Edelman,
    Arias and Smith 1998, The geometry of algorithms with orthogonality constraints, equation 2.39).
    A tangent vector is D = UA + QB with A = UᵀD skew and Q ⟂ U; then ‖D‖² = ½‖A‖² + ‖B‖².

    Args:
        n: Rows.
        p: Columns, at most n. For p = n this is O(n), whose two components no geodesic joins.
        max_iterations: Steps after which the logarithm gives up and says so.
    """

    def __init__(self, n: int, p: int, *, max_iterations: int = 60) -> None:
        if not 1 <= p <= n:
            raise MethodError(
                f"Stiefel({n}, {p}): {p} orthonormal columns do not fit in {n} dimensions",
                "take p between 1 and n, or transpose the matrix",
            )
        super().__init__(n, p)
        self.max_iterations = max_iterations

    def point(self, x: Tensor) -> Tensor:
        """The frame in float64, shape [..., n, p].

        Raises:
            MethodError: Its columns are not orthonormal.
        """
        u = as_float64(x, self.shape, str(self))
        gram = u.mT @ u - torch.eye(self.shape[1], dtype=u.dtype)
        problem = f"{self}: the columns are not orthonormal"
        cure = "take the Q of torch.linalg.qr(U), or the polar factor of U"
        require(gram.abs().amax(dim=(-2, -1)), rounding(x), problem, cure)
        return u if x.dtype == torch.float64 else polar(u)

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Tr uᵀ(I − ½xxᵀ)v, shape [...]."""
        return trace_product(u, v) - trace_product(x.mT @ u, x.mT @ v) / 2

    def _exp(self, x: Tensor, u: Tensor) -> Tensor:
        """[U Q] exp([A −Bᵀ; B 0]) [I; 0] (Edelman, Arias and Smith 1998, equation 2.45)."""
        x, u = broadcast(x, u)
        q = complement(x, u)
        core = rotation_exp(rotation_generator(skew(x.mT @ u), q.mT @ u))
        return torch.cat([x, q], dim=-1) @ core[..., : self.shape[1]]

    def _logarithm(self, x: Tensor, y: Tensor) -> Logarithm[Tensor]:
        """The algorithm of Zimmermann and Hüper 2022, arXiv 2103.12046, after Zimmermann 2017.

        In the basis [U Q] that holds both frames, Y is the first p columns of an orthogonal V of
        2p rows. Its other columns are free: they are turned, V₂ ← V₂ exp Γ, until log V has no
        lower right block C. Then log V = [A −Bᵀ; B 0] is the tangent vector.

        Raises:
            MethodError: p = n and the determinants differ.
        """
        x, y = broadcast(x, y)
        p = self.shape[1]
        q = complement(x, y)
        q, v = preprocess(q, complete(torch.cat([x.mT @ y, q.mT @ y], dim=-2)), p)
        a, b, residual, steps = self.turned(v)
        length = (frobenius(a).square() / 2 + b.square().sum(dim=(-2, -1))).sqrt()
        converged = residual <= CONVERGED * math.sqrt(p)
        return Logarithm(
            tangent=x @ a + q @ b,
            length=length,
            residual=residual,
            iterations=steps,
            converged=converged,
            certified=converged & (length < INJECTIVITY_RADIUS),
        )

    def turned(self, v: Tensor, stall: float = _STALL) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Turn the free columns of each V, in place, until log V = [A −Bᵀ; B 0].

        Args:
            v: Rotations whose first p columns are given, contiguous, shape [..., s, s].
            stall: Norm of the lower right block, over s, that counts as none.

        Returns:
            A, shape [..., p, p]; B, shape [..., s − p, p]; by how much their exponential misses the
            first p columns of V, and the steps taken, both of shape [...].
        """
        p, size = self.shape[1], v.shape[-1]
        flat = v.view(-1, size, size)
        logs = torch.zeros_like(flat)
        steps = torch.zeros(len(flat), dtype=torch.int64)
        active = torch.arange(len(flat))
        for step in range(self.max_iterations + 1):
            log = rotation_log(flat[active])
            logs[active], steps[active] = log, step
            block = log[:, p:, p:]
            going = frobenius(block) > stall * size
            active, log, block = active[going], log[going], block[going]
            if not len(active):
                break
            turn = rotation_exp(_sylvester(log[:, p:, :p], block))
            flat[active, :, p:] = flat[active, :, p:] @ turn
        logs = logs.reshape(v.shape)
        a, b = logs[..., :p, :p], logs[..., p:, :p]
        residual = frobenius((rotation_exp(rotation_generator(a, b)) - v)[..., :p])
        return a, b, residual, steps.reshape(v.shape[:-2])

    def project(self, x: Tensor, u: Tensor) -> Tensor:
        """Remove the normal part: u − x sym(xᵀu)."""
        u = u.to(torch.float64)
        return u - x @ sym(x.mT @ u)

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Tensor:
        """Uniform (Haar) frames."""
        n, p = self.shape
        return random_orthogonal(generator, n, p, batch)

    def isometry(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """U ↦ PUO with random P ∈ O(n), O ∈ O(p)."""
        n, p = self.shape
        left, right = random_orthogonal(generator, n, n), random_orthogonal(generator, p, p)
        return lambda x: left @ x @ right

    def guess(self, points: Tensor, weights: Tensor) -> Tensor:
        """The polar factor of the arithmetic mean."""
        return polar(self.combine(weights, points))


def rotation_generator(a: Tensor, b: Tensor) -> Tensor:
    """[A −Bᵀ; B 0] from A [..., p, p] and B [..., k, p]."""
    k = b.shape[-2]
    zero = b.new_zeros(*b.shape[:-2], k, k)
    return torch.cat([torch.cat([a, -b.mT], dim=-1), torch.cat([b, zero], dim=-1)], dim=-2)


def complete(columns: Tensor) -> Tensor:
    """An orthogonal matrix that begins with these orthonormal columns, [..., s, p] to [..., s, s]."""
    p = columns.shape[-1]
    basis = torch.linalg.qr(columns, mode="complete").Q
    return torch.cat([columns, basis[..., p:]], dim=-1)


def preprocess(q: Tensor, v: Tensor, p: int) -> tuple[Tensor, Tensor]:
    """Make the lower right block of V diagonal and non-negative, and det V = 1.

    The Procrustes preprocessing of Zimmermann and Hüper 2022: it starts the iteration
    near its end.
    """
    if v.shape[-1] == p:
        if (torch.linalg.det(v) < 0).any():
            raise MethodError(
                f"Stiefel({p}, {p}): the two frames have opposite determinants, and no curve in "
                "O(n) joins them",
                "flip the sign of one column of one of them, or keep fewer columns than rows",
            )
        return q, v
    left, _, right = torch.linalg.svd(v[..., p:, p:])
    v = torch.cat([v[..., :p], v[..., p:] @ right.mT], dim=-1)
    v = torch.cat([v[..., :p, :], left.mT @ v[..., p:, :]], dim=-2)
    signs = torch.ones(v.shape[:-2] + v.shape[-1:], dtype=v.dtype)
    signs[..., -1] = torch.where(torch.linalg.det(v) < 0, -1.0, 1.0)
    return q @ left, v * signs.unsqueeze(-2)


def _sylvester(b: Tensor, c: Tensor) -> Tensor:
    """Solve SΓ + ΓS = C, S = BBᵀ/12 − I/2, for the skew Γ (Zimmermann and Hüper 2022).

    Where ‖B‖ is so large that the equation loses its sign, which it cannot inside the injectivity
    radius, the step is bounded instead.
    """
    identity = torch.eye(b.shape[-2], dtype=b.dtype)
    values, vectors = torch.linalg.eigh(b @ b.mT / 12 - identity / 2)
    sums = (values.unsqueeze(-1) + values.unsqueeze(-2)).clamp(max=_SLOWEST)
    return skew(vectors @ ((vectors.mT @ c @ vectors) / sums) @ vectors.mT)
