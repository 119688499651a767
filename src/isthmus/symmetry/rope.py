"""What keys and queries with rotary position embeddings allow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from isthmus.errors import SymmetryError
from isthmus.geometry.linalg import polar
from isthmus.symmetry.group import Crosses, Group
from isthmus.symmetry.matrix_groups import GeneralLinear, summed

Layout = Literal["half", "interleaved"]
"""Which coordinates a frequency turns: i and i + rotary/2 (``half``), or 2i and 2i + 1."""

_SPREAD = 0.5


def planes(rotary: int, layout: Layout) -> Tensor:
    """The two coordinates of every frequency plane, shape [2, rotary / 2].

    Raises:
        SymmetryError: `rotary` is odd, or there is no such layout.
    """
    if rotary % 2:
        raise SymmetryError(
            f"RoPE turns {rotary} coordinates, which make no planes", "Give an even number."
        )
    if layout not in ("half", "interleaved"):
        raise SymmetryError(
            f"RoPE has no layout {layout!r}", 'Layouts are "half" and "interleaved".'
        )
    numbers = torch.arange(rotary)
    return numbers.reshape(2, -1) if layout == "half" else numbers.reshape(-1, 2).T


def _rotary(size: int, rotary: int | None) -> int:
    turned = size if rotary is None else rotary
    if not 0 <= turned <= size:
        raise SymmetryError(
            f"RoPE cannot turn {turned} of {size} coordinates",
            "Give a number from 0 to the size of a head.",
        )
    return turned


class Scaled(NamedTuple):
    """An element of `RopeCommutant`.

    Attributes:
        scales: Shape [rotary / 2], complex128: the factor of every plane.
        rest: Shape [size − rotary, size − rotary]: the matrix on what RoPE does not turn.
    """

    scales: Tensor
    rest: Tensor


class RopeCommutant(Group[Scaled]):
    """Invertible matrices that commute with the rotations of all positions.

    RoPE (Su et al. 2021, RoFormer, arXiv 2104.09864) turns every plane at its own frequency. What
    commutes with all of them keeps each plane and is there a complex number; where RoPE turns nothing
    (partial rotary), any invertible matrix. Keys are ``vector``, queries ``dual``.

    Args:
        size: Coordinates of a head.
        rotary: How many of them, from the first, RoPE turns; all if None.
        layout: Which two coordinates make a plane.

    Raises:
        SymmetryError: `rotary` is odd or does not fit, or there is no such layout.
    """

    roles = frozenset({"vector", "dual"})
    compact = False

    def __init__(self, size: int, rotary: int | None = None, layout: Layout = "half") -> None:
        self.n = size
        self.rotary = _rotary(size, rotary)
        self.layout = layout
        self.planes = planes(self.rotary, layout)
        self.rest = GeneralLinear(size - self.rotary)
        self.balance_needs = "gram" if self.rest.n else "diagonal"

    def __repr__(self) -> str:
        return f"RopeCommutant({self.n}, {self.rotary}, {self.layout!r})"

    def size(self, role: str) -> int:
        """Coordinates of a head, in both roles."""
        del role
        return self.n

    def identity(self) -> Scaled:
        """Factors 1 and the unit matrix."""
        return Scaled(torch.ones(self.rotary // 2, dtype=torch.complex128), self.rest.identity())

    def random(self, generator: torch.Generator) -> Scaled:
        """Uniform phases, log-normal sizes, and a random matrix."""
        size, angle = torch.randn(2, self.rotary // 2, generator=generator, dtype=torch.float64)
        angle = 2 * torch.pi * torch.rand(angle.shape, generator=generator, dtype=torch.float64)
        scales = torch.polar((_SPREAD * size).exp(), angle)
        return Scaled(scales, self.rest.random(generator))

    def compose(self, g: Scaled, h: Scaled) -> Scaled:
        """The element that acts as h and then g."""
        return Scaled(g.scales * h.scales, self.rest.compose(g.rest, h.rest))

    def inverse(self, g: Scaled) -> Scaled:
        """The element that undoes g."""
        return Scaled(1 / g.scales, self.rest.inverse(g.rest))

    def act(self, g: Scaled, rows: Tensor, role: str) -> Tensor:
        """Planes times c (``vector``) or 1 / c̄ (``dual``), the rest as for GL."""
        scales = g.scales if role == "vector" else 1 / g.scales.conj()
        shape = (-1, *(1 for _ in rows.shape[1:]))
        real = scales.real.to(rows).reshape(shape)
        imaginary = scales.imag.to(rows).reshape(shape)
        first, second = rows[self.planes[0]], rows[self.planes[1]]
        moved = torch.empty_like(rows)
        moved[self.planes[0]] = real * first - imaginary * second
        moved[self.planes[1]] = imaginary * first + real * second
        if self.rest.n:
            moved[self.rotary :] = self.rest.act(g.rest, rows[self.rotary :], role)
        return moved

    def match(self, crosses: Crosses) -> Scaled:
        """Per plane the phase of the cross's commuting part; Procrustes on the rest."""
        total = summed(crosses, self.n)
        first, second = self.planes
        commuting = torch.complex(
            total[first, first] + total[second, second],
            total[second, first] - total[first, second],
        )
        size = commuting.abs()
        phases = torch.where(size > 0, commuting / torch.where(size > 0, size, 1.0), 1.0)
        return Scaled(phases, polar(total[self.rotary :, self.rotary :]))

    def balance(self, squares: Mapping[str, Tensor]) -> Scaled:
        """One factor for each plane, with which its vectors and duals have the same norm."""
        vector, dual = (self._plane_squares(squares[role]) for role in ("vector", "dual"))
        free = (vector > 0) & (dual > 0)
        ratio = torch.where(free, dual, 1.0) / torch.where(free, vector, 1.0)
        rest = self.rest.identity()
        if self.rest.n:
            beyond = slice(self.rotary, None)
            rest = self.rest.balance({role: s[beyond, beyond] for role, s in squares.items()})
        return Scaled((ratio**0.25).to(torch.complex128), rest)

    def _plane_squares(self, square: Tensor) -> Tensor:
        diagonal = square if square.ndim == 1 else square.diagonal()
        return diagonal[self.planes].sum(dim=0)


class PlaneSigns(Group[Tensor]):
    """±1 for every frequency plane, and for every coordinate that RoPE does not turn.

    That is what stays of `RopeCommutant` where keys and queries are normalised and have gains of
    their own (QK-norm). Elements are the signs of the planes and then of the rest, in float64.

    Args:
        size: Coordinates of a head.
        rotary: How many of them, from the first, RoPE turns; all if None.
        layout: Which two coordinates make a plane.

    Raises:
        SymmetryError: `rotary` is odd or does not fit, or there is no such layout.
    """

    roles = frozenset({"vector", "dual"})
    compact = True

    def __init__(self, size: int, rotary: int | None = None, layout: Layout = "half") -> None:
        self.n = size
        self.rotary = _rotary(size, rotary)
        self.layout = layout
        pairs = planes(self.rotary, layout)
        self.owner = torch.arange(size) - self.rotary // 2
        self.owner[pairs] = torch.arange(self.rotary // 2).expand(2, -1)

    def __repr__(self) -> str:
        return f"PlaneSigns({self.n}, {self.rotary}, {self.layout!r})"

    def size(self, role: str) -> int:
        """Coordinates of a head, in both roles."""
        del role
        return self.n

    def identity(self) -> Tensor:
        """No sign changes."""
        return torch.ones(self.n - self.rotary // 2, dtype=torch.float64)

    def random(self, generator: torch.Generator) -> Tensor:
        """Fair signs."""
        signs = 2 * torch.randint(2, self.identity().shape, generator=generator) - 1
        return signs.to(torch.float64)

    def compose(self, g: Tensor, h: Tensor) -> Tensor:
        """The product of the signs."""
        return g * h

    def inverse(self, g: Tensor) -> Tensor:
        """Signs undo themselves."""
        return g

    def act(self, g: Tensor, rows: Tensor, role: str) -> Tensor:
        """Rows times their signs."""
        del role
        return rows * g[self.owner].to(rows).reshape(-1, *(1 for _ in rows.shape[1:]))

    def match(self, crosses: Crosses) -> Tensor:
        """The signs of what ΣC has on the diagonal, summed over each plane."""
        worth = torch.zeros_like(self.identity())
        worth.index_add_(0, self.owner, summed(crosses, self.n).diagonal())
        return torch.where(worth < 0, -1.0, 1.0).to(torch.float64)
