"""Sparsifiers: which entries of a task vector stay.

A sparsifier reads the task vectors of one tensor and returns a function that sparsifies chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array
from numpy.typing import NDArray

from isthmus.methods.deltas import DeltaChunk, Deltas
from isthmus.methods.selection import kth_largest_magnitudes
from isthmus.typing import Array

Sparsify: TypeAlias = Callable[[DeltaChunk], Array]
"""The sparse task vectors of one chunk, shape [K, n]; may overwrite the chunk."""

Sparsifier: TypeAlias = Callable[[Deltas, Sequence[float], Sequence[int]], Sparsify]
"""From the task vectors, the density of each in (0, 1], and a seed for each below 2**128."""


def keep_all(deltas: Deltas, densities: Sequence[float], seeds: Sequence[int]) -> Sparsify:  # noqa: ARG001
    """Keep every entry."""
    return lambda chunk: chunk.rows


def keep_largest(deltas: Deltas, densities: Sequence[float], seeds: Sequence[int]) -> Sparsify:  # noqa: ARG001
    """Keep the largest magnitudes: the trim step of TIES (Yadav et al. 2023, section 4.1).

    max(1, floor(density · size)) entries stay, and with them all that are as large as the
    smallest of these: so the result depends neither on the order of the entries nor on chunks.
    """
    ranks = [max(1, int(density * deltas.size)) for density in densities]
    if all(rank >= deltas.size for rank in ranks):
        return lambda chunk: chunk.rows
    thresholds = kth_largest_magnitudes(deltas, ranks)

    def sparsify(chunk: DeltaChunk) -> Array:
        trim(chunk.rows, thresholds)
        return chunk.rows

    return sparsify


def trim(rows: Array, thresholds: Sequence[float]) -> None:
    """Set to zero, in place, what is smaller than its row's threshold.

    Args:
        rows: Shape [K, n].
        thresholds: K magnitudes.
    """
    if is_numpy_array(rows):
        from isthmus.methods import kernels

        kernels.trim(rows, np.asarray(thresholds, rows.dtype))
    else:
        trim_by_array(rows, thresholds)


def trim_by_array(rows: Array, thresholds: Sequence[float]) -> None:
    """`trim` in the array API, for whatever arrays."""
    xp = array_namespace(rows)
    for row, threshold in enumerate(thresholds):
        delta = rows[row, ...]
        delta *= xp.abs(delta) >= threshold


def keep_random(deltas: Deltas, densities: Sequence[float], seeds: Sequence[int]) -> Sparsify:  # noqa: ARG001
    """Keep each entry with probability density, independently: DARE (Yu et al. 2023, section 3.2).

    The draw for an entry depends on the expert's seed and the entry's place alone.
    """

    def sparsify(chunk: DeltaChunk) -> Array:
        xp = array_namespace(chunk.rows)
        for row, (density, seed) in enumerate(zip(densities, seeds, strict=True)):
            if density < 1:
                delta = chunk.rows[row, ...]
                kept = bernoulli(seed, chunk.start, delta.shape[0], density)
                delta *= xp.asarray(kept, device=device(delta))
        return chunk.rows

    return sparsify


def bernoulli(seed: int, start: int, count: int, probability: float) -> NDArray[np.bool_]:
    """Entries `start : start + count` of a random sequence of booleans.

    Philox is a counter-based generator (Salmon et al. 2011): it can start anywhere, so chunks and
    workers do not change the sequence. One step of its counter yields eight float32 numbers.

    Args:
        seed: The key, below 2**128.
        start: A multiple of 8.
        count: How many.
        probability: Of true.

    Returns:
        Shape [count].
    """
    generator = np.random.Philox(key=seed)
    generator.advance(start // 8)
    return np.random.Generator(generator).random(count, dtype=np.float32) < probability
