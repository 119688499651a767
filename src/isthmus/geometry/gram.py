"""Lengths and angles of several vectors from their Gram matrix."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def norms(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """Euclidean norms.

    Args:
        gram: Inner products ⟨v_i, v_j⟩, shape [K, K].

    Returns:
        Shape [K].
    """
    lengths: NDArray[np.float64] = np.sqrt(np.clip(np.diagonal(gram), 0, None))
    return lengths


def cosines(gram: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cosines of the angles; NaN where a vector is zero and has no direction.

    Args:
        gram: Inner products ⟨v_i, v_j⟩, shape [K, K].

    Returns:
        Shape [K, K].
    """
    lengths = norms(gram)
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio: NDArray[np.float64] = gram / np.outer(lengths, lengths)
    return np.clip(ratio, -1, 1)
