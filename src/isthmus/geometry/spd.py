"""Symmetric positive definite matrices with the affine-invariant metric."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.geometry.checks import as_float64, require, rounding
from isthmus.geometry.linalg import frobenius, spectral, sym, trace_product
from isthmus.geometry.manifold import ArrayManifold, GeometryWarning, Logarithm, closed_form

ILL_CONDITIONED = 1e8
"""Condition number from which means lose half of float64's digits."""


class SPD(ArrayManifold):
    """Symmetric positive definite matrices B, shape [..., n, n].

    ⟨D, E⟩ = tr B⁻¹D B⁻¹E (Pennec, Fillard and Ayache 2006, A Riemannian framework for tensor
    computing, section 3). Curvature is nowhere positive: every two points are joined by one geodesic,
    and means are unique. Everything happens after whitening by the Cholesky factor B = LLᵀ.

    Args:
        n: Rows and columns.
    """

    def __init__(self, n: int) -> None:
        super().__init__(n, n)

    def __repr__(self) -> str:
        return f"SPD({self.shape[0]})"

    def point(self, x: Tensor) -> Tensor:
        """The matrix in float64, exactly symmetric, shape [..., n, n].

        Raises:
            MethodError: It is not symmetric or not positive definite.
        """
        b = as_float64(x, self.shape, str(self))
        scale = b.abs().amax(dim=(-2, -1)).clamp(min=torch.finfo(b.dtype).tiny)
        asymmetry = (b - b.mT).abs().amax(dim=(-2, -1)) / scale
        problem = f"{self}: the matrix is not symmetric"
        require(asymmetry, rounding(x), problem, "take (B + Bᵀ)/2")
        b = sym(b)
        values = torch.linalg.eigvalsh(b)
        smallest, largest = values[..., 0], values[..., -1]
        epsilon = self.shape[0] * torch.finfo(b.dtype).eps
        if not (smallest > epsilon * largest).all():
            raise MethodError(
                f"{self}: the matrix is not positive definite (smallest eigenvalue "
                f"{float(smallest.min()):.1e})",
                "add a small multiple of the identity, or keep fewer dimensions",
            )
        condition = float((largest / smallest).max())
        if condition > ILL_CONDITIONED:
            warnings.warn(
                f"{self}: condition number {condition:.0e}; distances lose digits, keep fewer "
                "dimensions for more",
                GeometryWarning,
                stacklevel=2,
            )
        return b

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Tr x⁻¹u x⁻¹v, shape [...]."""
        factor = torch.linalg.cholesky(x)
        return trace_product(_whiten(factor, u), _whiten(factor, v))

    def _exp(self, x: Tensor, u: Tensor) -> Tensor:
        factor = torch.linalg.cholesky(x)
        return sym(factor @ spectral(_whiten(factor, u), torch.exp) @ factor.mT)

    def _logarithm(self, x: Tensor, y: Tensor) -> Logarithm[Tensor]:
        factor = torch.linalg.cholesky(x)
        whitened = spectral(_whiten(factor, y), torch.log)
        return closed_form(sym(factor @ whitened @ factor.mT), frobenius(whitened))

    def project(self, x: Tensor, u: Tensor) -> Tensor:  # noqa: ARG002
        """The symmetric part of u."""
        return sym(u.to(torch.float64))

    def _gaussian(self, generator: torch.Generator, x: Tensor) -> Tensor:
        factor = torch.linalg.cholesky(x)
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        tangent: Tensor = factor @ sym(noise) @ factor.mT
        return tangent

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Tensor:
        """Exponentials of symmetric Gaussian matrices, eigenvalues spread around 1."""
        noise = torch.randn(*batch, *self.shape, generator=generator, dtype=torch.float64)
        return sym(spectral(sym(noise) / self.shape[0] ** 0.5, torch.exp))

    def isometry(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """A congruence B ↦ GBGᵀ with random invertible G."""
        noise = torch.randn(*self.shape, generator=generator, dtype=torch.float64)
        g = torch.eye(self.shape[0], dtype=noise.dtype) + noise / (2 * self.shape[0] ** 0.5)
        return lambda x: sym(g @ x @ g.mT)

    def guess(self, points: Tensor, weights: Tensor) -> Tensor:
        """The log-Euclidean mean exp Σ w log B (Arsigny et al. 2007)."""
        return spectral(self.combine(weights, spectral(points, torch.log)), torch.exp)


def _whiten(factor: Tensor, a: Tensor) -> Tensor:
    """L⁻¹AL⁻ᵀ for symmetric A."""
    half = torch.linalg.solve_triangular(factor, a, upper=False)
    return sym(torch.linalg.solve_triangular(factor, half.mT, upper=False))
