"""Flat space, and the round sphere in it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from isthmus.geometry.checks import as_float64, require, rounding
from isthmus.geometry.linalg import broadcast
from isthmus.geometry.manifold import ArrayManifold, Logarithm, closed_form

_ANTIPODAL = 1e-7


def random_orthogonal(
    generator: torch.Generator, n: int, p: int, batch: tuple[int, ...] = ()
) -> Tensor:
    """Uniform (Haar) matrices with orthonormal columns, shape [*batch, n, p].

    The signs of R's diagonal are moved into Q, without which the QR factorisation of a Gaussian
    matrix is not uniform (Mezzadri 2007, How to generate random matrices from the classical compact
    groups, section 5).
    """
    gaussian = torch.randn(*batch, n, p, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    signs = torch.where(torch.diagonal(r, dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(q.dtype)
    frames: Tensor = q * signs.unsqueeze(-2)
    return frames


class Euclidean(ArrayManifold):
    """Arrays of one shape with ⟨u, v⟩ = Σ uv: exp adds, log subtracts."""

    def point(self, x: Tensor) -> Tensor:
        """The array in float64, shape [..., *shape]."""
        return as_float64(x, self.shape, str(self))

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        """Σ uv, shape [...]."""
        return (u * v).sum(dim=tuple(range(-len(self.shape), 0)))

    def _exp(self, x: Tensor, u: Tensor) -> Tensor:
        return x + u

    def _logarithm(self, x: Tensor, y: Tensor) -> Logarithm[Tensor]:
        tangent = y - x
        return closed_form(tangent, self.norm(x, tangent))

    def project(self, x: Tensor, u: Tensor) -> Tensor:
        """Every array is a tangent vector."""
        return broadcast(x, u.to(torch.float64))[1]

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Tensor:
        """Independent normal numbers."""
        return torch.randn(*batch, *self.shape, generator=generator, dtype=torch.float64)

    def isometry(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """A rotation or reflection about a random point."""
        size = math.prod(self.shape)
        rotation = random_orthogonal(generator, size, size)
        shift = self.random(generator)

        def move(x: Tensor) -> Tensor:
            flat = x.reshape(*x.shape[: x.ndim - len(self.shape)], size)
            return (flat @ rotation.mT).reshape(x.shape) + shift

        return move

    def guess(self, points: Tensor, weights: Tensor) -> Tensor:
        """The weighted mean: here it is the Fréchet mean itself."""
        return self.combine(weights, points)


class Sphere(ArrayManifold):
    """Unit vectors of R^n, shape [..., n]; geodesics are great circles, distances are angles.

    Args:
        n: Dimension of the surrounding space.
    """

    def __init__(self, n: int) -> None:
        super().__init__(n)

    def point(self, x: Tensor) -> Tensor:
        """The vector in float64, shape [..., n].

        Raises:
            MethodError: It has not length 1.
        """
        y = as_float64(x, self.shape, str(self))
        length = torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        problem = f"{self}: the vector has not length 1"
        require((length - 1).abs(), rounding(x), problem, "divide it by its norm")
        return y if x.dtype == torch.float64 else _unit(y)

    def inner(self, x: Tensor, u: Tensor, v: Tensor) -> Tensor:  # noqa: ARG002
        """Σ uv, shape [...]."""
        return (u * v).sum(dim=-1)

    def _exp(self, x: Tensor, u: Tensor) -> Tensor:
        angle = torch.linalg.vector_norm(u, dim=-1, keepdim=True)
        return _unit(angle.cos() * x + torch.sinc(angle / math.pi) * u)

    def _logarithm(self, x: Tensor, y: Tensor) -> Logarithm[Tensor]:
        across = self.project(x, y)
        sine = torch.linalg.vector_norm(across, dim=-1)
        angle = torch.atan2(sine, (x * y).sum(dim=-1))
        ratio = torch.where(sine > 0, angle / torch.where(sine > 0, sine, 1.0), 1.0)
        return closed_form(ratio.unsqueeze(-1) * across, angle, angle < math.pi - _ANTIPODAL)

    def project(self, x: Tensor, u: Tensor) -> Tensor:
        """Remove the radial part: u − ⟨x, u⟩x."""
        u = u.to(torch.float64)
        return u - (x * u).sum(dim=-1, keepdim=True) * x

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Tensor:
        """Uniform on the sphere."""
        return _unit(torch.randn(*batch, *self.shape, generator=generator, dtype=torch.float64))

    def isometry(self, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """A random element of O(n)."""
        rotation = random_orthogonal(generator, self.shape[0], self.shape[0])
        return lambda x: x @ rotation.mT

    def guess(self, points: Tensor, weights: Tensor) -> Tensor:
        """The direction of the arithmetic mean; the first point if that is zero."""
        mean = self.combine(weights, points)
        length = torch.linalg.vector_norm(mean)
        return mean / length if length > _ANTIPODAL else points[0]


def _unit(x: Tensor) -> Tensor:
    """The vector divided by its length."""
    unit: Tensor = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return unit
