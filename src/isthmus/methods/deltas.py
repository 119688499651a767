"""Task vectors, read in chunks: what the experts changed of the base."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from isthmus.methods.method import Chunk, TensorStream
from isthmus.typing import Array


@dataclass(frozen=True, slots=True)
class DeltaChunk:
    """A stretch of the task vectors of one tensor.

    Attributes:
        start: Offset of the first element in the flattened tensor.
        rows: Shape [K, n]; may be overwritten.
    """

    start: int
    rows: Array


@dataclass(frozen=True, slots=True)
class Deltas:
    """The task vectors τ_k = θ_k - θ_0 of one tensor; iterable any number of times."""

    tensor: TensorStream

    @property
    def size(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.tensor.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the precision of the merge."""
        return self.tensor.itemsize

    def __iter__(self) -> Iterator[DeltaChunk]:
        return map(difference, self.tensor)


def difference(chunk: Chunk) -> DeltaChunk:
    """Subtract the base from every expert, in place."""
    experts = chunk.experts
    experts -= cast("Array", chunk.base)
    return DeltaChunk(chunk.start, experts)
