"""Products of manifolds: points are tuples, squared lengths add."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.geometry.linalg import broadcast
from isthmus.geometry.manifold import Logarithm, Manifold

T = TypeVar("T", bound=tuple[Tensor, ...])


class Product(Manifold[T], Generic[T]):
    """The product M₁ × … × M_k with ⟨u, v⟩ = Σ ⟨u_i, v_i⟩.

    Args:
        factors: The manifolds, whose points are arrays.
    """

    def __init__(self, *factors: Manifold[Tensor]) -> None:
        self.factors = factors

    def __repr__(self) -> str:
        return f"Product({', '.join(map(repr, self.factors))})"

    def _pack(self, parts: Iterable[Tensor]) -> T:
        return cast("T", tuple(parts))

    def point(self, x: T) -> T:
        """The point, every factor checked.

        Raises:
            MethodError: Not a tuple of as many parts as factors, or a part is no point.
        """
        if not isinstance(x, tuple) or len(x) != len(self.factors):
            raise MethodError(
                f"{self}: a point is a tuple of {len(self.factors)} arrays",
                "give one array for each factor",
            )
        return self._pack(factor.point(part) for factor, part in zip(self.factors, x, strict=True))

    def inner(self, x: T, u: T, v: T) -> Tensor:
        """Σ ⟨u_i, v_i⟩, shape [...]."""
        parts = [
            factor.inner(a, b, c) for factor, a, b, c in zip(self.factors, x, u, v, strict=True)
        ]
        return torch.stack(broadcast(*parts)).sum(dim=0)

    def _exp(self, x: T, u: T) -> T:
        return self._pack(
            factor._exp(a, b) for factor, a, b in zip(self.factors, x, u, strict=True)
        )

    def _logarithm(self, x: T, y: T) -> Logarithm[T]:
        return self._join(
            [factor._logarithm(a, b) for factor, a, b in zip(self.factors, x, y, strict=True)]
        )

    def _join(self, parts: Sequence[Logarithm[Tensor]]) -> Logarithm[T]:
        """One logarithm from those of the factors: as good as the worst of them."""
        return Logarithm(
            tangent=self._pack(part.tangent for part in parts),
            length=torch.stack([part.length for part in parts]).square().sum(dim=0).sqrt(),
            residual=torch.stack([part.residual for part in parts]).square().sum(dim=0).sqrt(),
            iterations=torch.stack([part.iterations for part in parts]).amax(dim=0),
            converged=torch.stack([part.converged for part in parts]).all(dim=0),
            certified=torch.stack([part.certified for part in parts]).all(dim=0),
        )

    def project(self, x: T, u: T) -> T:
        """Every factor's projection."""
        return self._pack(
            factor.project(a, b) for factor, a, b in zip(self.factors, x, u, strict=True)
        )

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> T:
        """Independent random points."""
        return self._pack(factor.random(generator, batch) for factor in self.factors)

    def _gaussian(self, generator: torch.Generator, x: T) -> T:
        return self._pack(
            factor._gaussian(generator, a) for factor, a in zip(self.factors, x, strict=True)
        )

    def isometry(self, generator: torch.Generator) -> Callable[[T], T]:
        """One isometry for each factor."""
        moves = [factor.isometry(generator) for factor in self.factors]
        return lambda x: self._pack(move(part) for move, part in zip(moves, x, strict=True))

    def guess(self, points: T, weights: Tensor) -> T:
        """Every factor's cheap mean."""
        return self._pack(
            factor.guess(part, weights) for factor, part in zip(self.factors, points, strict=True)
        )

    def stack(self, points: Sequence[T]) -> T:
        """K points or tangent vectors in one batch, shapes [K, ...]."""
        return self._pack(torch.stack(parts) for parts in zip(*points, strict=True))

    def scale(self, factor: Tensor | float, u: T) -> T:
        """The vector factor · u; a tensor has the shape [...] of the batch."""
        return self._pack(
            manifold.scale(factor, part) for manifold, part in zip(self.factors, u, strict=True)
        )

    def combine(self, factors: Tensor, vectors: T) -> T:
        """Σ_k factor_k u_k of K tangent vectors at one point."""
        return self._pack(
            manifold.combine(factors, part)
            for manifold, part in zip(self.factors, vectors, strict=True)
        )
