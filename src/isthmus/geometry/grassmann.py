"""The Grassmann manifold of subspaces, each given by any orthonormal basis."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from isthmus.geometry.euclidean import random_orthogonal
from isthmus.geometry.linalg import broadcast, frobenius, polar, trace_product
from isthmus.geometry.manifold import ArrayManifold, Logarithm
from isthmus.geometry.stiefel import CONVERGED, Stiefel


class Grassmann(ArrayManifold):
    """Subspaces of dimension p in R^n as bases U, shape [..., n, p]; U and UO are the same point.

    Tangent vectors are horizontal, UᵀD = 0, with ⟨D, E⟩ = tr DᵀE. The distance is ‖θ‖ in the
    principal angles θ (Bendokat, Zimmermann and Absil 2024, A Grassmann manifold handbook, arXiv
    2011.13699, sections 3 and 5): the canonical Stiefel distance between bases that are aligned.

    Args:
        n: Dimension of the surrounding space.
        p: Dimension of the subspaces.
    """

    def __init__(self, n: int, p: int) -> None:
        super().__init__(n, p)
        self._frames = Stiefel(n, p)

    def point(self, x: Tensor) -> Tensor:
        """The basis in float64, shape [..., n, p].

        Raises:
            MethodError: Its columns are not orthonormal.
        """
        return self._frames.point(x)

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        """Tr uᵀv, shape [...]."""
        return trace_product(u, v)

    def _exp(self, x: Tensor, u: Tensor) -> Tensor:
        """X R cos Θ Rᵀ + Q sin Θ Rᵀ for u = QΘRᵀ, made orthonormal again against rounding."""
        left, angles, right = torch.linalg.svd(u, full_matrices=False)
        cosines, sines = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
        return polar(((x @ right.mT) * cosines + left * sines) @ right)

    def _logarithm(self, x: Tensor, y: Tensor) -> Logarithm[Tensor]:
        """Principal angles from sines and cosines both: exact near 0 and near π/2.

        Algorithm 5.3 of Bendokat, Zimmermann and Absil 2024, y first turned next to x.
        """
        x, y = broadcast(x, y)
        y = y @ polar(y.mT @ x)
        left, sines, right = torch.linalg.svd(y - x @ (x.mT @ y), full_matrices=False)
        cosines = torch.linalg.svdvals(x.mT @ y).flip(-1)
        angles = torch.atan2(sines, cosines)
        tangent = (left * angles.unsqueeze(-2)) @ right
        # Two subspaces of more than half the dimension meet: surplus sines are rounding, not angles.
        end = self._exp(x, tangent)
        residual = frobenius(end - y @ (y.mT @ end))
        converged = residual <= CONVERGED * math.sqrt(self.shape[1])
        return Logarithm(
            tangent=tangent,
            length=torch.linalg.vector_norm(angles, dim=-1),
            residual=residual,
            iterations=torch.zeros_like(residual, dtype=torch.int64),
            converged=converged,
            certified=converged & (cosines[..., 0] > math.sqrt(torch.finfo(x.dtype).eps)),
        )

    def project(self, x: Tensor, u: Tensor) -> Tensor:
        """The horizontal part u − xxᵀu."""
        u = u.to(torch.float64)
        return u - x @ (x.mT @ u)

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Tensor:
        """Uniform subspaces."""
        return self._frames.random(generator, batch)

    def isometry(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """U ↦ PUO with random P ∈ O(n), and another O ∈ O(p) at every call."""
        n, p = self.shape
        left = random_orthogonal(generator, n, n)
        return lambda x: left @ x @ random_orthogonal(generator, p, p)

    def guess(self, points: Tensor, weights: Tensor) -> Tensor:
        """The dominant subspace of Σ w UUᵀ, the mean of the projectors, from a thin SVD.

        (Sarlette and Sepulchre 2009, Consensus optimization on manifolds.)
        """
        scaled = points * weights.sqrt().reshape(-1, 1, 1)
        wide = scaled.movedim(0, -2).reshape(self.shape[0], -1)
        basis: Tensor = torch.linalg.svd(wide, full_matrices=False).U[:, : self.shape[1]]
        return basis
