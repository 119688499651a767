"""The nearest matrix of low rank, for matrices of the size of a model's weights."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_OVERSAMPLING = 8
"""Directions a Krylov block has beyond the rank."""

_GROWTH = 1e-9
"""The Krylov space is large enough when its last block added less than this share of the energy."""


class Truncation(NamedTuple):
    """left @ right, the nearest matrix of its rank in the Frobenius norm.

    Attributes:
        left: Shape [m, r], float64: U √S of the singular value decomposition.
        right: Shape [r, n], float64: √S Vᵀ.
        kept: The share of the squared Frobenius norm that is kept; 1 for a zero matrix.
    """

    left: NDArray[np.float64]
    right: NDArray[np.float64]
    kept: float

    @property
    def rank(self) -> int:
        """The number of singular values kept."""
        return int(self.left.shape[1])


def truncate(matrix: NDArray[np.float64], rank: int) -> Truncation:
    """The best approximation of a rank (Eckart and Young 1936).

    Small ranks come from a block Krylov space of MᵀM (Musco and Musco 2015, arXiv 1504.05477,
    algorithm 2), enlarged until it gains nothing; others from its eigenvectors, as in
    `truncate_to_energy`.

    Args:
        matrix: Shape [m, n], finite.
        rank: The most singular values to keep, at least 1. Those that are zero up to rounding are
            left out.
    """
    tall = _tall(matrix)
    right = None
    # Beyond that the Krylov space costs more than the decomposition.
    if 16 * (rank + _OVERSAMPLING) <= tall.shape[1]:
        right = _krylov(tall, rank)
    if right is None:
        right = _eigen(tall)[1][:, :rank]
    return _projected(matrix, right)


def truncate_to_energy(
    matrix: NDArray[np.float64], share: float, least: int = 1, most: int | None = None
) -> Truncation:
    """The least rank that keeps a share of the squared Frobenius norm.

    The right singular vectors are eigenvectors of the Gram matrix of the shorter side: a third of
    the work of a full decomposition. Squaring costs half of the digits of singular values below
    1e-8 of the largest, whose energy is below 1e-16; the approximation is a projection on the
    vectors found, and its energy is measured, not inferred.

    Args:
        matrix: Shape [m, n], finite.
        share: Between 0 and 1.
        least: The smallest rank to return, as far as the matrix has it.
        most: The largest rank to return, whatever it keeps.
    """
    values, right = _eigen(_tall(matrix))
    reached = np.cumsum(values)
    rank = int(np.searchsorted(reached, share * reached[-1])) + 1
    rank = max(rank, least) if most is None else min(max(rank, least), most)
    return _projected(matrix, right[:, :rank])


def _tall(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    return matrix.T if matrix.shape[0] < matrix.shape[1] else matrix


def _eigen(tall: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Squared singular values, shape [n], the largest first, and right singular vectors, [n, n]."""
    values, vectors = np.linalg.eigh(tall.T @ tall)
    return np.clip(values[::-1], 0, None), vectors[:, ::-1]


def _krylov(tall: NDArray[np.float64], rank: int) -> NDArray[np.float64] | None:
    """The leading right singular vectors, shape [n, rank]; None if a Krylov space is too slow."""
    n = tall.shape[1]
    width = rank + _OVERSAMPLING
    start = np.random.default_rng(0).standard_normal((n, width))
    basis = np.linalg.qr(tall.T @ (tall @ start))[0]
    image = tall @ basis
    block, kept = image, 0.0
    while basis.shape[1] + width <= n // 2:
        new = tall.T @ block
        # Twice is enough: rounding in the first pass is as large as what it leaves.
        for _ in range(2):
            new -= basis @ (basis.T @ new)
            new = np.linalg.qr(new)[0]
        block = tall @ new
        basis, image = np.hstack([basis, new]), np.hstack([image, block])
        values, vectors = np.linalg.eigh(image.T @ image)
        before, kept = kept, float(values[-rank:].sum())
        if kept - before <= _GROWTH * kept:
            leading: NDArray[np.float64] = basis @ vectors[:, : -rank - 1 : -1]
            return leading
    return None


def _projected(matrix: NDArray[np.float64], vectors: NDArray[np.float64]) -> Truncation:
    """The matrix projected on orthonormal singular vectors of its shorter side, balanced."""
    wide = matrix.shape[0] < matrix.shape[1]
    images = (matrix.T if wide else matrix) @ vectors
    lengths = np.linalg.norm(images, axis=0)
    tiny = max(matrix.shape) * np.finfo(np.float64).eps * lengths.max(initial=0.0)
    there = lengths > tiny
    images, vectors, lengths = images[:, there], vectors[:, there], lengths[there]
    energy = float(np.vdot(matrix, matrix))
    kept = min(float(np.vdot(lengths, lengths)) / energy, 1.0) if energy else 1.0
    # An eigenvector's sign is whatever the library's is; this one has a rule.
    peaks = vectors[np.argmax(np.abs(vectors), axis=0), np.arange(vectors.shape[1])]
    vectors = vectors * (np.sign(peaks) * np.sqrt(lengths))
    images = images * (np.sign(peaks) / np.sqrt(lengths))
    return Truncation(vectors, images.T, kept) if wide else Truncation(images, vectors.T, kept)
