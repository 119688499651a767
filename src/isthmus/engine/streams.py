"""Checkpoints as the streams of chunks that methods read."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from isthmus.checkpoints import Checkpoint, Dtype, TensorInfo
from isthmus.engine.devices import Device
from isthmus.errors import NonFiniteError
from isthmus.methods.method import Chunk
from isthmus.typing import StorageArray


@dataclass(frozen=True, slots=True)
class Operand:
    """One tensor of one model."""

    model: Checkpoint
    name: str

    @property
    def info(self) -> TensorInfo:
        """Its format and shape."""
        return self.model.tensors[self.name]


class StoppedError(Exception):
    """The work was stopped, by the user or because another worker failed."""


class Buffers(threading.local):
    """A worker's arrays, kept from tensor to tensor: fresh memory costs seven times the reading."""

    def __init__(self) -> None:
        self._arrays: dict[np.dtype[Any], StorageArray] = {}

    def take(self, rows: int, columns: int, dtype: np.dtype[Any]) -> StorageArray:
        """An array of shape [rows, columns] with arbitrary contents, valid until the next call."""
        size = rows * columns
        if dtype not in self._arrays or self._arrays[dtype].size < size:
            self._arrays[dtype] = np.empty(size, dtype)
        return self._arrays[dtype][:size].reshape(rows, columns)


@dataclass(slots=True)
class CheckpointStream:
    """One tensor of every model, read from the files as often as it is iterated.

    Attributes:
        base: The base model's tensor, or None.
        experts: The experts' tensors.
        compute: float32 or float64, the precision of the merge.
        chunk_size: Elements a chunk.
        device: Where the merge runs.
        buffers: The worker's arrays.
        check_finite: Whether to refuse NaN and infinity while reading.
        stop: When set, reading ends with StoppedError.
    """

    base: Operand | None
    experts: Sequence[Operand]
    compute: np.dtype[np.floating]
    chunk_size: int
    device: Device
    buffers: Buffers
    check_finite: bool
    stop: threading.Event
    _checked: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.experts[0].info.shape

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the precision of the merge."""
        return self.compute.itemsize

    def __iter__(self) -> Iterator[Chunk]:
        for start, count in self.stretches():
            yield self.read(start, count)
        self._checked = True

    def stretches(self) -> Iterator[tuple[int, int]]:
        """Start and length of each chunk."""
        size = math.prod(self.shape)
        for start in range(0, size, self.chunk_size):
            yield start, min(self.chunk_size, size - start)

    def read(self, start: int, count: int) -> Chunk:
        """One chunk, valid until the next is read.

        Raises:
            NonFiniteError: if it holds NaN or infinity and may not.
            StoppedError: if `stop` was set.
        """
        if self.stop.is_set():
            raise StoppedError
        operands = self._operands()
        stack = self.buffers.take(len(operands), count, self.compute)
        for row, operand in zip(stack, operands, strict=True):
            operand.model.read(operand.name, start, row)
            if self.check_finite and not self._checked:
                require_finite(row, operand, start)
        experts = self.device.put(stack[: len(self.experts)])
        base = None if self.base is None else self.device.put(stack[-1])
        return Chunk(start, experts, base)

    def read_codes(self, start: int, count: int) -> StorageArray:
        """Bit patterns of the experts' bfloat16 numbers, shape [K, n], valid until the next read.

        Raises:
            StoppedError: if `stop` was set.
        """
        if self.stop.is_set():
            raise StoppedError
        codes = self.buffers.take(len(self.experts), count, np.dtype(np.uint16))
        for row, operand in zip(codes, self.experts, strict=True):
            operand.model.read_stored(
                operand.name, start, start + count, row.view(Dtype.BF16.storage)
            )
        return codes

    def _operands(self) -> list[Operand]:
        return [*self.experts] if self.base is None else [*self.experts, self.base]

    def require_finite(self, start: int, count: int) -> None:
        """Read a stretch again and refuse NaN and infinity in it.

        Raises:
            NonFiniteError: naming the model, the tensor and the place.
        """
        (row,) = self.buffers.take(1, count, self.compute)
        for operand in self._operands():
            operand.model.read(operand.name, start, row)
            require_finite(row, operand, start)


def require_finite(values: StorageArray, operand: Operand, start: int) -> None:
    """Refuse NaN and infinity.

    Raises:
        NonFiniteError: naming the model, the tensor and the place.
    """
    if lies_within(values, operand.info.dtype.largest):
        return
    place = int(np.argmin(np.isfinite(values)))
    index = tuple(int(i) for i in np.unravel_index(start + place, operand.info.shape or (1,)))
    raise NonFiniteError(
        f"{operand.model.label}: tensor {operand.name} holds {values[place]} at {index}",
        "The model is probably broken. Pass --allow-nonfinite to merge it all the same.",
    )


def lies_within(values: StorageArray, largest: float) -> bool:
    """Whether -largest <= v <= largest for all values, which NaN is not.

    Args:
        values: Shape [n], n at least 1. Two reductions are cheaper than a mask.
        largest: A finite bound.
    """
    return bool(values.max() <= largest and values.min() >= -largest)
