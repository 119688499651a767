"""Writing one shard, its tensors in any order and from any thread."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np

from isthmus.checkpoints.layout import Shard
from isthmus.checkpoints.regular import TOO_MANY, TOO_MANY_CURE, allow_many_files
from isthmus.closing import Closing
from isthmus.errors import OutputError
from isthmus.typing import StorageArray

# What file systems answer that cannot reserve space; they are written to all the same.
_NO_RESERVATION = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


class ShardWriter(Closing):
    """A shard that is being written.

    The disk space is reserved and the header written when it opens; every tensor's place is
    known. The file is complete when all elements of all tensors were written; until `sync`
    returns, a power cut can undo that.

    Args:
        path: The file to write; the caller renames it to `shard.file` when it is complete.
        shard: What it will hold.
        resume: Keep what an earlier, interrupted writer of the same shard left in the file.

    Raises:
        OutputError: if the file cannot be created or the disk is too full.
    """

    def __init__(self, path: Path, shard: Shard, *, resume: bool = False) -> None:
        self.path = path
        self.shard = shard
        self._descriptor = -1
        allow_many_files()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if resume else os.O_TRUNC)
        try:
            self._descriptor = os.open(path, flags, 0o666)
            self._reserve()
        except OSError as error:
            if self._descriptor >= 0 and not resume:
                path.unlink(missing_ok=True)
            self.close()
            raise _output_error(path, shard.size, error) from error
        self._put(np.frombuffer(shard.header, np.uint8), 0)

    def _reserve(self) -> None:
        """Give the file its final length, and the disk blocks for it where that is possible."""
        try:
            os.posix_fallocate(self._descriptor, 0, self.shard.size)
        except OSError as error:
            if error.errno not in _NO_RESERVATION:
                raise
        os.ftruncate(self._descriptor, self.shard.size)

    def write(self, name: str, start: int, array: StorageArray) -> None:
        """Write elements of one tensor. Safe from several threads at once.

        Args:
            name: The tensor.
            start: Where the array's first element lies in the flattened tensor.
            array: The elements, in the tensor's storage type.

        Raises:
            OutputError: if the disk is full or broken.
            TypeError: if the array has another type than the tensor.
            IndexError: if the tensor has no such elements.
        """
        info = self.shard.tensors[name]
        if array.dtype != info.dtype.storage:
            raise TypeError(f"{name} is written as {info.dtype.storage}, not {array.dtype}")
        if start < 0 or start + array.size > info.numel:
            raise IndexError(f"{name} has {info.numel} elements, not {start}:{start + array.size}")
        if array.size:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._put(flat, self.shard.positions[name] + start * info.dtype.itemsize)

    def sync(self) -> None:
        """Return when all that was written has reached the disk.

        Raises:
            OutputError: if it could not.
        """
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise _output_error(self.path, self.shard.size, error) from error

    def close(self) -> None:
        """Release the file. Closing twice is allowed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _put(self, memory: StorageArray, position: int) -> None:
        done = 0
        view = memory.data
        while done < memory.size:
            try:
                done += os.pwrite(self._descriptor, view[done:], position + done)
            except OSError as error:
                raise _output_error(self.path, self.shard.size, error) from error


def _output_error(path: Path, size: int, error: OSError) -> OutputError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutputError(
            f"{path}: the disk is full; this file takes {size} bytes",
            "Free some space, or write to another disk.",
        )
    if error.errno in TOO_MANY:
        return OutputError(f"{path} cannot be opened: {error.strerror}", TOO_MANY_CURE)
    if error.errno == errno.EFBIG:
        return OutputError(
            f"{path}: the file system cannot hold a file of {size} bytes",
            "Ask for smaller shards, or write to another disk.",
        )
    return OutputError(
        f"{path} cannot be written: {error.strerror}", "See that the folder exists and is yours."
    )
