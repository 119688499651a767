"""What every checkpoint offers, whatever its format: names, shapes, and chunks of numbers."""

from __future__ import annotations

import math
import os
from abc import abstractmethod
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from isthmus.checkpoints.dtypes import Dtype, copied, encode
from isthmus.closing import Closing
from isthmus.typing import FloatArray, StorageArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Name, number format and shape of one stored tensor."""

    name: str
    dtype: Dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements; one for a zero-dimensional tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes that the elements take."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that a checkpoint reads, as it was when it was opened."""

    path: Path
    size: int
    modified_ns: int

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> SourceFile:
        """The file at `path` whose `stat` answered `status`."""
        return cls(path, status.st_size, status.st_mtime_ns)


class Source(Protocol):
    """What a merge takes from: a model or an adapter."""

    @property
    def label(self) -> str:
        """The model as the user wrote it."""

    @property
    def path(self) -> Path | None:
        """The folder or file on this machine; None for a model in memory."""

    @property
    def sources(self) -> tuple[SourceFile, ...]:
        """The files that it reads."""


class Checkpoint(Closing):
    """An opened checkpoint. Opening reads headers alone; numbers come when asked for.

    Reading is safe from several threads at once.

    Attributes:
        label: The model as the user wrote it; errors and reports use it.
        path: The folder or file on this machine; None for a model in memory.
        tensors: Every stored tensor by name, in the order of the file.
        tied: Names that share their numbers with another stored tensor, and that tensor's name.
            A tied name is not in `tensors`.
        tied_by_file: Those of `tied` that the weights themselves record, whatever `config.json`
            says. An output must record them too, or they are lost.
        config: The parsed `config.json`, or None.
        sources: The files that the tensors depend on.
        notes: What the user should know about how the checkpoint was read, one sentence each.
        computed: Names whose numbers are computed when they are read, so that `read` gives them
            more precisely than `read_stored`, which rounds them.
        rewritten: Whether `config` is not what its `config.json` says, so that an output must write it.
    """

    label: str
    path: Path | None
    tensors: Mapping[str, TensorInfo]
    tied: Mapping[str, str]
    tied_by_file: Mapping[str, str]
    config: Mapping[str, Any] | None
    sources: tuple[SourceFile, ...]
    notes: tuple[str, ...]
    computed: Set[str] = frozenset()
    rewritten: bool = False

    @abstractmethod
    def read(self, name: str, start: int, out: FloatArray) -> None:
        """Decode elements `start : start + out.size` of the flattened tensor into `out`.

        Args:
            name: A key of `tensors`.
            start: Offset of the first element, in elements.
            out: Contiguous float32 or float64 array of shape [n]; overwritten.

        Raises:
            CheckpointError: if the file is shorter than its header says, or changed meanwhile.
        """

    @abstractmethod
    def read_stored(
        self, name: str, start: int, stop: int, out: StorageArray | None = None
    ) -> StorageArray:
        """Elements `start : stop` of the flattened tensor as stored, without any conversion.

        Args:
            name: A key of `tensors`.
            start: Offset of the first element, in elements.
            stop: Offset after the last.
            out: Contiguous array of shape [stop - start] in the tensor's storage type to put
                them in; fresh memory without it, which costs more than the reading.

        Returns:
            Contiguous array of shape [stop - start] whose dtype is `tensors[name].dtype.storage`.
        """

    def _read_rounded(
        self, name: str, start: int, stop: int, out: StorageArray | None
    ) -> StorageArray:
        """`read_stored` by way of `read`, for numbers that are computed."""
        dtype = self.tensors[name].dtype
        size = stop - start
        values: FloatArray = (
            np.empty(size, np.float64) if dtype is Dtype.F64 else np.empty(size, np.float32)
        )
        self.read(name, start, values)
        stored = encode(values, dtype)
        return stored if out is None else copied(stored, out)

    @abstractmethod
    def close(self) -> None:
        """Release the files. Closing twice is allowed."""
