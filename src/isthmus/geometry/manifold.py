"""What every manifold here can do."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

P = TypeVar("P")
"""Points, and tangent vectors, which are stored alike: a tensor or a tuple of tensors."""


class GeometryWarning(UserWarning):
    """A result that is returned although nothing guarantees it; the result says why."""


@dataclass(frozen=True)
class Logarithm(Generic[P]):
    """The tangent vector u at x with exp_x(u) = y, and what is known about it.

    Attributes:
        tangent: u, of the shape of x.
        length: ‖u‖, shape [...].
        residual: How far exp_x(u) misses y, shape [...].
        iterations: Steps that were taken, shape [...].
        converged: The residual is rounding, shape [...].
        certified: Converged, and short enough that u is known to be the shortest, shape [...].
            Where it is False, u may belong to another geodesic between the same two points.
    """

    tangent: P
    length: Tensor
    residual: Tensor
    iterations: Tensor
    converged: Tensor
    certified: Tensor


class Manifold(ABC, Generic[P]):
    """A Riemannian manifold. Everything is batched over leading dimensions, which broadcast.

    `exp`, `log`, `dist` and `logarithm` check their points first (`point`); computation is in float64.
    """

    @abstractmethod
    def point(self, x: P) -> P:
        """The same point in float64, its constraint restored where it came in fewer digits.

        Raises:
            MethodError: x is no point of this manifold.
        """

    @abstractmethod
    def inner(self, x: P, u: P, v: P) -> Tensor:
        """Inner product ⟨u, v⟩ of two tangent vectors at x, shape [...]."""

    def norm(self, x: P, u: P) -> Tensor:
        """Length of a tangent vector at x, shape [...]."""
        return self.inner(x, u, u).clamp(min=0).sqrt()

    def exp(self, x: P, u: P) -> P:
        """The point at time 1 on the geodesic that leaves x with velocity u."""
        return self._exp(self.point(x), u)

    def logarithm(self, x: P, y: P) -> Logarithm[P]:
        """The velocity at x of a geodesic that is at y at time 1, with its certificates."""
        return self._logarithm(self.point(x), self.point(y))

    def log(self, x: P, y: P) -> P:
        """`logarithm(x, y).tangent`; warns where it did not converge."""
        return self._settled(x, y).tangent

    def dist(self, x: P, y: P) -> Tensor:
        """`logarithm(x, y).length`, shape [...]; warns where it did not converge."""
        return self._settled(x, y).length

    def _settled(self, x: P, y: P) -> Logarithm[P]:
        result = self.logarithm(x, y)
        if not result.converged.all():
            warnings.warn(
                f"{self}: no geodesic found between two points (residual "
                f"{float(result.residual.max()):.1e}); `logarithm` returns the details",
                GeometryWarning,
                stacklevel=3,
            )
        return result

    @abstractmethod
    def _exp(self, x: P, u: P) -> P:
        """`exp` for a point that was checked."""

    @abstractmethod
    def _logarithm(self, x: P, y: P) -> Logarithm[P]:
        """`logarithm` for points that were checked."""

    @abstractmethod
    def project(self, x: P, u: P) -> P:
        """The tangent vector at x next to an array u of the shape of x."""

    @abstractmethod
    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> P:
        """Random points of shape [*batch, ...]."""

    def random_tangent(self, generator: torch.Generator, x: P) -> P:
        """A random tangent vector of length 1 at x."""
        u = self.project(x, self._gaussian(generator, x))
        return self.scale(1 / self.norm(x, u), u)

    @abstractmethod
    def _gaussian(self, generator: torch.Generator, x: P) -> P:
        """Independent normal numbers in the shape of x."""

    @abstractmethod
    def isometry(self, generator: torch.Generator) -> Callable[[P], P]:
        """A random element of the group under which distances do not change, as a map of points."""

    @abstractmethod
    def guess(self, points: P, weights: Tensor) -> P:
        """A cheap mean from which the Fréchet mean is sought.

        Args:
            points: K points, shape [K, ...].
            weights: Shape [K], non-negative, of sum 1.
        """

    @abstractmethod
    def stack(self, points: Sequence[P]) -> P:
        """K points or tangent vectors in one batch, shape [K, ...]."""

    @abstractmethod
    def scale(self, factor: Tensor | float, u: P) -> P:
        """The vector factor · u; a tensor has the shape [...] of the batch."""

    @abstractmethod
    def combine(self, factors: Tensor, vectors: P) -> P:
        """Σ_k factor_k u_k of K tangent vectors at one point; shapes [K] and [K, ...]."""


class ArrayManifold(Manifold[Tensor]):
    """A manifold whose points are arrays of one shape."""

    def __init__(self, *shape: int) -> None:
        self.shape = shape

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self.shape))})"

    def _gaussian(self, generator: torch.Generator, x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=generator, dtype=torch.float64)

    def stack(self, points: Sequence[Tensor]) -> Tensor:
        """K points or tangent vectors in one batch, shape [K, ...]."""
        return torch.stack(list(points))

    def scale(self, factor: Tensor | float, u: Tensor) -> Tensor:
        """The vector factor · u; a tensor has the shape [...] of the batch."""
        if isinstance(factor, Tensor):
            factor = factor.reshape(*factor.shape, *(1 for _ in self.shape))
        return factor * u

    def combine(self, factors: Tensor, vectors: Tensor) -> Tensor:
        """Σ_k factor_k u_k of K tangent vectors at one point; shapes [K] and [K, ...]."""
        total: Tensor = torch.tensordot(factors, vectors, dims=1)
        return total


def closed_form(
    tangent: Tensor, length: Tensor, certified: Tensor | None = None
) -> Logarithm[Tensor]:
    """The logarithm of a manifold where a formula gives it: no iterations, no residual.

    Args:
        tangent: The tangent vector.
        length: Its length, shape [...].
        certified: Where the points are not on each other's cut locus; everywhere if None.
    """
    if certified is None:
        certified = torch.ones_like(length, dtype=torch.bool)
    return Logarithm(
        tangent=tangent,
        length=length,
        residual=torch.zeros_like(length),
        iterations=torch.zeros_like(length, dtype=torch.int64),
        converged=certified,
        certified=certified,
    )
