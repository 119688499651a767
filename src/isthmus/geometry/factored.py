"""Low-rank matrices as products of two factors, and bases that several of them share.

Nothing here forms an m x n matrix: K updates of rank r cost O((m + n)(Kr)²).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.errors import MethodError

NEGLIGIBLE = 1e-9
"""A direction whose singular value is this small beside the largest is taken for rounding.

Factors that were re-gauged by a matrix of condition 1e6 carry errors of about 1e-10.
"""

TIED = 1e-9
"""Singular values that differ by less than this share of the larger are equal."""


class Factored(NamedTuple):
    """left @ right, never formed.

    Attributes:
        left: Shape [m, r].
        right: Shape [r, n].
    """

    left: Tensor
    right: Tensor

    @classmethod
    def zero(cls, m: int, n: int) -> Factored:
        """The zero matrix of shape [m, n], as a product of rank 0."""
        return cls(torch.zeros(m, 0, dtype=torch.float64), torch.zeros(0, n, dtype=torch.float64))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the product."""
        return self.left.shape[0], self.right.shape[1]

    @property
    def rank(self) -> int:
        """Columns of the left factor: an upper bound of the product's rank."""
        return self.left.shape[1]

    @property
    def exponent(self) -> float:
        """log₂ of the largest |left[:, j]| |right[j]| in the maximum norm; −∞ if all are zero.

        An entry of the product is at most `rank` times that. It is found where it overflows, too.
        """
        if not self.rank or 0 in self.shape:
            return -math.inf
        left, right = self.left.double().abs().amax(0), self.right.double().abs().amax(1)
        return float((left.log2() + right.log2()).max())

    def double(self) -> Factored:
        """Both factors in float64."""
        return Factored(self.left.double(), self.right.double())

    def scaled(self, factor: float) -> Factored:
        """The product times a number."""
        return Factored(self.left * factor, self.right)

    def padded(self, rank: int) -> Factored:
        """The same product with as many columns and rows as `rank`, no less than its own; zeros."""
        more = rank - self.rank
        pad = torch.nn.functional.pad
        return Factored(pad(self.left, (0, more)), pad(self.right, (0, 0, 0, more)))

    def matrix(self) -> Tensor:
        """The product itself, shape [m, n]."""
        return self.left @ self.right

    def recompressed(self, rank: int) -> tuple[Factored, float]:
        """The best approximation of a rank in the Frobenius norm (Eckart and Young 1936).

        Two thin QR factorisations and the SVD of a matrix of the factors' rank.

        Args:
            rank: At least 1.

        Returns:
            Balanced factors U√S and √SVᵀ of exactly `rank` columns and rows, the last of them zero
            where the matrix has less; and the share of the squared norm that is kept, 1.0 for
            the zero matrix.

        Raises:
            MethodError: if the rank is below 1.
        """
        left, of_left = torch.linalg.qr(self.left.double())
        right, of_right = torch.linalg.qr(self.right.double().mT)
        return compressed(left, of_left @ of_right.mT, right, rank)


class Joint(NamedTuple):
    """Several matrices in bases that they share: ΔW_k = left @ cores[k] @ right.T.

    Attributes:
        left: Orthonormal columns that span all column spaces, shape [m, R].
        right: Orthonormal columns that span all row spaces, shape [n, R'].
        cores: Shape [K, R, R'].
    """

    left: Tensor
    right: Tensor
    cores: Tensor


def stacked(updates: Sequence[Factored], weights: Sequence[float]) -> Factored:
    """sum_k w_k ΔW_k as one product whose rank is the sum of the ranks; nothing is computed.

    Args:
        updates: Matrices of one shape.
        weights: A number for each; its root goes to either factor, its sign to the left one.
    """
    left = [
        x.left.double() * abs(w) ** 0.5 * _sign(w) for x, w in zip(updates, weights, strict=True)
    ]
    right = [x.right.double() * abs(w) ** 0.5 for x, w in zip(updates, weights, strict=True)]
    return Factored(torch.cat(left, dim=1), torch.cat(right, dim=0))


def joint(updates: Sequence[Factored]) -> Joint:
    """The bases that several low-rank matrices share, and their coordinates in them.

    The bases are the singular vectors of [ΔW_1 ... ΔW_K], and of the same stacked from top to
    bottom, the strongest direction first. So they depend on the matrices alone, not on their
    factors, where singular vectors of the stacked factors (Panariello et al. 2025, arXiv
    2509.17786) depend on these. Signs are fixed: a vector's largest entry is positive. Two directions of
    the same singular value have no order; their basis is then whatever rounding makes it.
    Directions below NEGLIGIBLE beside the strongest are dropped.

    Args:
        updates: At least one, all of one shape. A matrix may be zero.

    Returns:
        R and R' are 0 if all are zero.
    """
    updates = [update.double() for update in updates]
    left = left_basis(updates)
    right = left_basis([Factored(update.right.mT, update.left.mT) for update in updates])
    cores = [(left.mT @ update.left) @ (update.right @ right) for update in updates]
    return Joint(left, right, torch.stack(cores))


def left_basis(updates: Sequence[Factored]) -> Tensor:
    """The left singular vectors of [ΔW_1 ... ΔW_K], shape [m, R]; see `joint`."""
    stack = torch.cat([update.left for update in updates], dim=1).double()
    if not stack.shape[1]:
        return stack
    basis, coordinates = torch.linalg.qr(stack)
    # [ΔW_1 ... ΔW_K] = stack · diag(right_1, ..., right_K), and with right_kᵀ = Q_k T_k the last
    # factor is diag(T_1ᵀ, ..., T_Kᵀ) times orthonormal rows, which leave left vectors alone.
    rotated, column = [], 0
    for update in updates:
        triangle: Tensor = torch.linalg.qr(update.right.double().mT, mode="r").R
        rotated.append(coordinates[:, column : column + update.rank] @ triangle.mT)
        column += update.rank
    vectors, values, _ = torch.linalg.svd(torch.cat(rotated, dim=1), full_matrices=False)
    found: Tensor = basis @ vectors[:, : numerical_rank(values)]
    if not found.shape[1]:
        return found
    largest = found.gather(0, found.abs().argmax(dim=0, keepdim=True))
    return found * largest.sign()


def numerical_rank(values: Tensor) -> int:
    """How many singular values, given in descending order, are not NEGLIGIBLE."""
    return int((values > NEGLIGIBLE * values[0]).sum()) if values.numel() else 0


def compressed(
    left: Tensor, core: Tensor, right: Tensor, rank: int, *, guide: Tensor | None = None
) -> tuple[Factored, float]:
    """The best approximation of a rank to left @ core @ right.T; see `Factored.recompressed`.

    Args:
        left: Orthonormal columns, shape [m, R].
        core: Shape [R, R'].
        right: Orthonormal columns, shape [n, R'].
        rank: At least 1.
        guide: Shape [R, R'], or None. Where the singular values on both sides of the cut are equal,
            as in a matrix whose spectrum was made flat, all choices of directions are best. Then
            those are kept in which this matrix is largest, rather than those that rounding
            happens to put first.

    Raises:
        MethodError: if the rank is below 1.
    """
    if rank < 1:
        raise MethodError(
            f"a matrix cannot be compressed to rank {rank}", "Ask for rank 1 or more."
        )
    u, values, vh = torch.linalg.svd(core, full_matrices=False)
    size = values.numel()
    if guide is not None and rank < size:
        u, vh = _settled(u, values, vh, rank, guide)
    epsilon = torch.finfo(values.dtype).eps * max(*core.shape, 1)
    count = min(rank, int((values > epsilon * values[0]).sum()) if size else 0)
    roots = values[:count].sqrt()
    balanced = Factored(left @ (u[:, :count] * roots), (roots.unsqueeze(1) * vh[:count]) @ right.mT)
    energies = values.square()
    total = float(energies.sum())
    return balanced.padded(rank), float(energies[:count].sum()) / total if total else 1.0


def _settled(
    u: Tensor, values: Tensor, vh: Tensor, rank: int, guide: Tensor
) -> tuple[Tensor, Tensor]:
    """Singular vectors, those whose value ties with the last that is kept in the guide's order."""
    last = values[rank - 1]
    if last - values[rank] > TIED * last:
        return u, vh
    tied = (values - last).abs() <= TIED * last
    seen = u[:, tied].mT @ guide @ vh[tied].mT
    turn: Tensor = torch.linalg.eigh((seen + seen.mT) / 2).eigenvectors.flip(-1)
    u, vh = u.clone(), vh.clone()
    u[:, tied], vh[tied] = u[:, tied] @ turn, turn.mT @ vh[tied]
    return u, vh


def _sign(number: float) -> float:
    return -1.0 if number < 0 else 1.0
