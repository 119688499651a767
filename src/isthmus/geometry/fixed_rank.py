"""Low-rank matrices as polar points (U, B, V), and what a change of basis does to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.geometry.checks import as_float64
from isthmus.geometry.euclidean import random_orthogonal
from isthmus.geometry.linalg import broadcast, skew, spectral, sym
from isthmus.geometry.manifold import Logarithm
from isthmus.geometry.product import Product
from isthmus.geometry.spd import SPD
from isthmus.geometry.stiefel import Stiefel


class Polar(NamedTuple):
    """ΔW = U B Vᵀ with orthonormal U and V and positive definite B.

    (UO, OᵀBO, VO) with orthogonal O is another point for the same matrix: the gauge (Bonnabel and
    Sepulchre 2009, Riemannian metric and geometric mean for positive semidefinite matrices of fixed
    rank, section 3; Mishra et al. 2014, Fixed-rank matrix factorizations and Riemannian low-rank
    optimization, section 3.1).

    Attributes:
        u: Shape [..., m, r].
        b: Shape [..., r, r].
        v: Shape [..., n, r].
    """

    u: Tensor
    b: Tensor
    v: Tensor

    @classmethod
    def of_pair(
        cls, left: Tensor, right: Tensor, *, scale: float = 1.0, rank: int | None = None
    ) -> Polar:
        """The polar point of ΔW = scale · left @ right, which is never formed.

        Two thin QR factorisations leave an r x r core, whose SVD gives U, B and V in
        O((m + n)r²). With left = B, right = A and scale = α/r this is a LoRA adapter.

        Args:
            left: Shape [..., m, r].
            right: Shape [..., r, n].
            scale: Factor of the product, not zero.
            rank: How many singular values to keep; all r of them if None.

        Raises:
            MethodError: Shapes that do not multiply, NaN, or fewer singular values than asked for.
        """
        if left.ndim < 2 or right.ndim < 2 or left.shape[-1] != right.shape[-2]:
            raise MethodError(
                f"low-rank pair: shapes {list(left.shape)} and {list(right.shape)} do not multiply",
                "give B of shape [m, r] and A of shape [r, n]",
            )
        left = as_float64(left, tuple(left.shape[-2:]), "left factor of the low-rank pair")
        right = as_float64(right, tuple(right.shape[-2:]), "right factor of the low-rank pair")
        (q_left, r_left), (q_right, r_right) = torch.linalg.qr(left), torch.linalg.qr(right.mT)
        u, singular, vt = torch.linalg.svd(scale * r_left @ r_right.mT, full_matrices=False)
        kept = left.shape[-1] if rank is None else rank
        noise = left.shape[-1] * torch.finfo(left.dtype).eps * singular[..., :1]
        numerical = int((singular > noise).sum(dim=-1).min())
        if not 1 <= kept <= numerical:
            raise MethodError(
                f"low-rank pair: rank {kept} was asked for, the product has rank {numerical}",
                f"pass rank={numerical}"
                if numerical
                else "leave this expert out: it changes nothing",
            )
        return cls(
            q_left @ u[..., :, :kept],
            torch.diag_embed(singular[..., :kept]),
            q_right @ vt.mT[..., :, :kept],
        )

    def pair(self) -> tuple[Tensor, Tensor]:
        """Balanced factors (U B^½, B^½ Vᵀ), shapes [..., m, r] and [..., r, n]."""
        root = spectral(self.b, torch.sqrt)
        return self.u @ root, root @ self.v.mT

    def matrix(self) -> Tensor:
        """ΔW = U B Vᵀ, shape [..., m, n]."""
        return self.u @ self.b @ self.v.mT

    def turned(self, o: Tensor) -> Polar:
        """The same matrix in other bases: (UO, OᵀBO, VO) for orthogonal O, shape [..., r, r]."""
        return Polar(self.u @ o, sym(o.mT @ self.b @ o), self.v @ o)


class FixedRank(Product[Polar]):
    """Polar points St(m, r) × SPD(r) × St(n, r); each gauge is a point of its own.

    O(r) acts by isometries. Its orbits are the m x n matrices of rank r: `Quotient`.

    Args:
        m: Rows.
        n: Columns.
        r: Rank.
    """

    def __init__(self, m: int, n: int, r: int) -> None:
        super().__init__(Stiefel(m, r), SPD(r), Stiefel(n, r))
        self.sizes = (m, n, r)

    def __repr__(self) -> str:
        return f"FixedRank{self.sizes}"

    def _pack(self, parts: Iterable[Tensor]) -> Polar:
        return Polar(*parts)

    def _logarithm(self, x: Polar, y: Polar) -> Logarithm[Polar]:
        """As for every product; frames of one size share a batch."""
        m, n, _ = self.sizes
        if m != n:
            return super()._logarithm(x, y)
        frames = self.factors[0]._logarithm(
            torch.stack(broadcast(x.u, x.v)), torch.stack(broadcast(y.u, y.v))
        )
        core = self.factors[1]._logarithm(x.b, y.b)
        return self._join([_part(frames, 0), core, _part(frames, 1)])

    def vertical(self, x: Polar, omega: Tensor) -> Polar:
        """The velocity of the gauge x exp(tΩ) at t = 0: (UΩ, BΩ − ΩB, VΩ).

        Args:
            x: A point.
            omega: Skew-symmetric, shape [..., r, r].
        """
        return Polar(x.u @ omega, x.b @ omega - omega @ x.b, x.v @ omega)

    def gauge(self, x: Polar, t: Polar) -> Tensor:
        """The Ω whose vertical vector is the vertical part of t, shape [..., r, r].

        It solves ⟨vertical(Ω), vertical(Ψ)⟩ = ⟨t, vertical(Ψ)⟩ for all skew Ψ. In the eigenbasis of
        B that system is diagonal, with 1 + (λ_i − λ_j)²/λ_iλ_j on the diagonal.
        """
        values, basis = torch.linalg.eigh(x.b)
        of_frames = skew(x.u.mT @ t.u + x.v.mT @ t.v) / 2
        of_core = basis.mT @ t.b @ basis / values.unsqueeze(-1)
        right_side = basis.mT @ of_frames @ basis - of_core + of_core.mT
        rows, columns = values.unsqueeze(-1), values.unsqueeze(-2)
        omega = right_side / (1 + (rows - columns).square() / (rows * columns))
        return skew(basis @ omega @ basis.mT)

    def isometry(self, generator: torch.Generator) -> Callable[[Polar], Polar]:
        """(U, B, V) ↦ (PUO, OᵀBO, QVO) with random P ∈ O(m), Q ∈ O(n), O ∈ O(r)."""
        m, n, r = self.sizes
        left, right = random_orthogonal(generator, m, m), random_orthogonal(generator, n, n)
        turn = random_orthogonal(generator, r, r)
        return lambda x: Polar(left @ x.u, x.b, right @ x.v).turned(turn)


def _part(log: Logarithm[Tensor], index: int) -> Logarithm[Tensor]:
    """One of a batch of logarithms."""
    return Logarithm(
        tangent=log.tangent[index],
        length=log.length[index],
        residual=log.residual[index],
        iterations=log.iterations[index],
        converged=log.converged[index],
        certified=log.certified[index],
    )
