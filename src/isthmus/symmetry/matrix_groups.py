"""Groups of full matrices: orthogonal and invertible ones."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.geometry.euclidean import random_orthogonal
from isthmus.geometry.linalg import polar, spectral, sym
from isthmus.symmetry.group import Crosses, Group

_SPREAD = 0.5

_FLOOR = 1e-10
"""Smallest eigenvalue of a gram that counts, relative to the mean one: singular values of 1e-5."""


class Orthogonal(Group[Tensor]):
    """Orthogonal matrices: a residual stream read by RMSNorm whose gains are absorbed.

    Elements have the shape [n, n]; ``vector`` and ``dual`` are the same.

    Args:
        n: Length of the axis.
        keeps_mean: Only those that leave the vector of ones where it is, so that a LayerNorm's mean and
            variance stay.
    """

    roles = frozenset({"vector", "dual"})
    compact = True

    def __init__(self, n: int, *, keeps_mean: bool = False) -> None:
        self.n = n
        self.keeps_mean = keeps_mean

    def __repr__(self) -> str:
        return f"Orthogonal({self.n}{', keeps_mean=True' if self.keeps_mean else ''})"

    def size(self, role: str) -> int:
        """The length of the axis, in every role."""
        del role
        return self.n

    def identity(self) -> Tensor:
        """The unit matrix."""
        return torch.eye(self.n, dtype=torch.float64)

    def random(self, generator: torch.Generator) -> Tensor:
        """A uniform (Haar) element."""
        if not self.keeps_mean:
            return random_orthogonal(generator, self.n, self.n)
        return self._beside_mean(random_orthogonal(generator, self.n - 1, self.n - 1))

    def compose(self, g: Tensor, h: Tensor) -> Tensor:
        """The element that acts as h and then g."""
        return g @ h

    def inverse(self, g: Tensor) -> Tensor:
        """The transpose."""
        return g.mT

    def act(self, g: Tensor, rows: Tensor, role: str) -> Tensor:
        """The product of g and the rows."""
        del role
        return times(g, rows)

    def match(self, crosses: Crosses) -> Tensor:
        """The polar factor of ΣC (Schönemann 1966, orthogonal Procrustes problem).

        With `keeps_mean` it is taken on the complement of the vector of ones.
        """
        total = summed(crosses, self.n)
        if not self.keeps_mean:
            return polar(total)
        basis = self._complement()
        return self._beside_mean(polar(basis.mT @ total @ basis))

    def score(self, g: Tensor, crosses: Crosses) -> float:
        """⟨ΣC, g⟩."""
        return float((summed(crosses, self.n) * g).sum())

    def _complement(self) -> Tensor:
        """Orthonormal columns beside the vector of ones, shape [n, n − 1], by one reflection."""
        ones = torch.full((self.n,), 1 / math.sqrt(self.n), dtype=torch.float64)
        mirror = ones.clone()
        mirror[0] += 1
        reflection = torch.eye(self.n, dtype=torch.float64)
        reflection -= torch.outer(mirror, mirror) / (1 + ones[0])
        return reflection[:, 1:]

    def _beside_mean(self, inner: Tensor) -> Tensor:
        basis = self._complement()
        return basis @ inner @ basis.mT + 1 / self.n


class GeneralLinear(Group[Tensor]):
    """Invertible matrices: values and outputs of attention heads; keys and queries without RoPE.

    Elements have the shape [n, n].

    Args:
        n: Length of the axis.
    """

    roles = frozenset({"vector", "dual"})
    compact = False
    balance_needs = "gram"

    def __init__(self, n: int) -> None:
        self.n = n

    def __repr__(self) -> str:
        return f"GeneralLinear({self.n})"

    def size(self, role: str) -> int:
        """The length of the axis, in every role."""
        del role
        return self.n

    def identity(self) -> Tensor:
        """The unit matrix."""
        return torch.eye(self.n, dtype=torch.float64)

    def random(self, generator: torch.Generator) -> Tensor:
        """Random singular vectors, log-normal singular values."""
        left, right = random_orthogonal(generator, self.n, self.n, (2,))
        drawn = torch.randn(self.n, generator=generator, dtype=torch.float64)
        element: Tensor = (left * (_SPREAD * drawn).exp()) @ right.mT
        return element

    def compose(self, g: Tensor, h: Tensor) -> Tensor:
        """The element that acts as h and then g."""
        return g @ h

    def inverse(self, g: Tensor) -> Tensor:
        """The inverse matrix."""
        inverse: Tensor = torch.linalg.inv(g)
        return inverse

    def act(self, g: Tensor, rows: Tensor, role: str) -> Tensor:
        """The rows times g (``vector``) or g⁻ᵀ (``dual``)."""
        return times(g if role == "vector" else self.inverse(g).mT, rows)

    def match(self, crosses: Crosses) -> Tensor:
        """The orthogonal element, a polar factor: see `Orthogonal.match`."""
        return polar(summed(crosses, self.n))

    def balance(self, squares: Mapping[str, Tensor]) -> Tensor:
        """R = P^½ with PVP = D for the grams V of the vectors and D of the duals.

        P = RᵀR minimises tr PV + tr P⁻¹D, so it is the geometric mean V⁻¹ # D (Bhatia 2007, Positive
        definite matrices, section 4.1). Where a gram is singular no least norm is reached, only
        approached; a small floor under the eigenvalues keeps R bounded there. Without vectors or
        without duals nothing is better than anything: the identity.
        """
        vector, dual = squares["vector"], squares["dual"]
        if not (vector.any() and dual.any()):
            return self.identity()
        vector, dual = _floored(vector), _floored(dual)
        root = spectral(vector, torch.sqrt)
        inverse_root = spectral(vector, torch.rsqrt)
        middle = spectral(sym(root @ dual @ root), _root)
        return spectral(sym(inverse_root @ middle @ inverse_root), _root)


def times(matrix: Tensor, rows: Tensor) -> Tensor:
    """The matrix [m, n] times rows [n, ...], in the dtype of the rows."""
    product: Tensor = torch.tensordot(matrix.to(rows), rows, dims=1)
    return product


def summed(crosses: Crosses, n: int) -> Tensor:
    """The crosses of both roles, which for orthogonal elements are one."""
    return sum(crosses.values(), start=torch.zeros(n, n, dtype=torch.float64))


def _floored(gram: Tensor) -> Tensor:
    n = gram.shape[0]
    floor = _FLOOR * gram.trace() / n
    return sym(gram) + floor * torch.eye(n, dtype=gram.dtype)


def _root(values: Tensor) -> Tensor:
    return values.clamp(min=0).sqrt()
