"""A proof that paths between two kinds of solutions rise by at least one half: every wall, exactly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from isthmus.two_layer.network import Data
from isthmus.two_layer.split import KINDS, Cell, antipodal_pairs, components

Numbers = tuple[Fraction, ...]
_HALF = Fraction(1, 2)


@dataclass(frozen=True)
class Minimum:
    """The least loss over the closure of a cell, or of a wall of one, with a dual proof.

    Where the signs of all wᵢ·p and wᵢ·q are given, and those of the aᵢ, the outputs at (p, −p, q, −q) are Bx:
    x ≥ 0 holds the |aᵢ||wᵢ·p| and |aᵢ||wᵢ·q| that are not zero, and B has the sign of aᵢ in the row of the
    point that is active. Since p and q are independent, every x ≥ 0 occurs. So the least loss is that of a
    small quadratic program min ½‖Bx − 1‖², x ≥ 0, and each ρ with Bᵀρ ≤ 0 proves that it is at least
    1ᵀρ − ½‖ρ‖².

    Attributes:
        signs: Of w₁·p, w₁·q, w₂·p, w₂·q; the one that is 0 names the wall.
        outer: The signs of a₁, a₂.
        primal: x, an entry for each sign that is not 0.
        dual: ρ, four entries.
        value: The least loss.
    """

    signs: tuple[int, ...]
    outer: tuple[int, int]
    primal: Numbers
    dual: Numbers
    value: Fraction

    def verify(self) -> bool:
        """Whether x and ρ are feasible and both have the value; exact."""
        columns = list(_columns(self.signs, self.outer))
        if len(columns) != len(self.primal) or len(self.dual) != 4 or min(self.primal) < 0:
            return False
        outputs = [Fraction(0)] * 4
        for (row, sign), x in zip(columns, self.primal, strict=True):
            outputs[row] += sign * x
        reached = _HALF * sum((1 - f) ** 2 for f in outputs)
        proven = sum(self.dual) - _HALF * sum(rho**2 for rho in self.dual)
        feasible = all(sign * self.dual[row] <= 0 for row, sign in columns)
        return feasible and reached == proven == self.value


@dataclass(frozen=True, eq=False)
class SplitCertificate:
    """Why no path leads from one component to another without a loss of at least `barrier`.

    The nodes of the graph are the 16 cells of signs of (w₁·p, w₁·q, w₂·p, w₂·q), its edges the 32 faces
    between two of them. A path that changes its cell meets one of the four walls wᵢ·p = 0, wᵢ·q = 0, and each
    wall is the union of eight closed faces, corners included.

    Attributes:
        data: Points ±p, ±q, labels 1.
        cells: The least loss of each closed cell and pair of signs of a.
        faces: The least loss of each closed face and pair of signs of a.
        barrier: The least of all faces.
    """

    data: Data
    cells: tuple[Minimum, ...]
    faces: tuple[Minimum, ...]
    barrier: Fraction

    def verify(self) -> bool:
        """Check everything anew, in rational arithmetic; nothing is sampled.

        That p and q are independent; that every cell and face is there once, with every pair of signs; every
        primal and dual solution; that no face is below the barrier and one attains it; that the graph without
        the faces at or above the barrier leaves the components in different parts; that zero loss occurs in
        their four cells only.

        Raises:
            TwoLayerError: the data are of another form.
        """
        p, q = ([Fraction(float(value)) for value in point] for point in antipodal_pairs(self.data))
        if p[0] * q[1] == p[1] * q[0]:
            return False
        if not _complete(self.cells, _cells()) or not _complete(self.faces, _faces()):
            return False
        if not all(minimum.verify() for minimum in (*self.cells, *self.faces)):
            return False
        if min(face.value for face in self.faces) != self.barrier:
            return False
        solved = sorted({cell.signs for cell in self.cells if cell.value == 0})
        expected = {
            kind: [c.cell for c in components(self.data) if c.kind == kind] for kind in KINDS
        }
        parts = self.parts(self.barrier)
        return solved == sorted(cell for cells in expected.values() for cell in cells) and len(
            {parts[_cell(signs)] for signs in solved}
        ) == len(solved)

    def parts(self, level: Fraction) -> dict[Cell, int]:
        """The parts into which the cells fall when only faces with points of loss below the level are passed.

        Args:
            level: Of the loss.

        Returns:
            By cell the number of its part.
        """
        parts = {_cell(signs): k for k, signs in enumerate(_cells())}
        for face in self.faces:
            if face.value < level:
                one, other = (
                    parts[_cell(tuple(sign or side for sign in face.signs))] for side in (1, -1)
                )
                parts = {cell: one if part == other else part for cell, part in parts.items()}
        return parts


def split_certificate(data: Data) -> SplitCertificate:
    """Solve the program of every cell and face.

    B has one entry a column, so the rows decouple: a point that a neuron of positive a is active on is fitted
    exactly, any other has output 0 at best.

    Args:
        data: As `two_neuron_data` gives them.

    Raises:
        TwoLayerError: other data.
    """
    antipodal_pairs(data)
    cells = tuple(_solve(signs, outer) for signs in _cells() for outer in _OUTER)
    faces = tuple(_solve(signs, outer) for signs in _faces() for outer in _OUTER)
    return SplitCertificate(data, cells, faces, min(face.value for face in faces))


_OUTER = tuple((one, other) for one in (1, -1) for other in (1, -1))


def _cells() -> Iterator[tuple[int, ...]]:
    return product((1, -1), repeat=4)


def _faces() -> Iterator[tuple[int, ...]]:
    for wall in range(4):
        for signs in product((1, -1), repeat=3):
            yield (*signs[:wall], 0, *signs[wall:])


def _cell(signs: tuple[int, ...]) -> Cell:
    one, two, three, four = signs
    return one, two, three, four


def _columns(signs: tuple[int, ...], outer: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """By column of B its row, the active point of (p, −p, q, −q), and its entry."""
    for k, sign in enumerate(signs):
        if sign:
            neuron, pair = divmod(k, 2)
            yield 2 * pair + (sign < 0), outer[neuron]


def _solve(signs: tuple[int, ...], outer: tuple[int, int]) -> Minimum:
    covered: set[int] = set()
    primal = []
    for row, sign in _columns(signs, outer):
        fits = sign > 0 and row not in covered
        primal.append(Fraction(int(fits)))
        if fits:
            covered.add(row)
    dual = tuple(Fraction(int(row not in covered)) for row in range(4))
    return Minimum(signs, outer, tuple(primal), dual, _HALF * sum(dual))


def _complete(minima: tuple[Minimum, ...], signs: Iterator[tuple[int, ...]]) -> bool:
    expected = sorted((one, outer) for one in signs for outer in _OUTER)
    return sorted((minimum.signs, minimum.outer) for minimum in minima) == expected
