"""Reading safetensors files, in pieces, into memory that the caller owns.

The safetensors library either maps a file or loads whole tensors. Isthmus streams chunks of many
large files through a few buffers that it uses again and again, and must state its peak memory;
so it needs to know where the bytes are and to read them itself. Nothing is ever mapped: a mapped
file that is cut short kills the process, and mapped pages count as memory in use.
"""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path

import numpy as np

from isthmus.checkpoints.base import SourceFile
from isthmus.checkpoints.dtypes import Dtype, decode
from isthmus.checkpoints.regular import open_regular
from isthmus.checkpoints.safetensors_header import LENGTH_BYTES, MAX_HEADER_BYTES, parse_header
from isthmus.checkpoints.tensor_file import TensorFile, check_range
from isthmus.errors import CheckpointError
from isthmus.typing import FloatArray, StorageArray

# Other formats are read piece by piece through a scratch buffer that stays in the processor's
# cache between being filled and being decoded.
_SCRATCH_BYTES = 1 << 17
_scratch = threading.local()


class SafetensorsFile(TensorFile):
    """An opened safetensors file.

    Args:
        path: The file.

    Raises:
        CheckpointError: if it cannot be read, or its header is not what the format demands.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor, status = open_regular(path)
        # Closes the file also when the object is dropped, or its opening fails below.
        self._release = weakref.finalize(self, os.close, self._descriptor)
        self.source = SourceFile.of(path, status)
        file = str(path)
        size = status.st_size
        if size < LENGTH_BYTES:
            raise CheckpointError(
                f"{file} is {'empty' if size == 0 else f'only {size} bytes long'}",
                "Download it again; Git LFS or a broken copy can leave such files.",
            )
        prefix = np.empty(LENGTH_BYTES, np.uint8)
        self._fill(prefix, 0, "header")
        length = int.from_bytes(prefix.tobytes(), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{file} is not a safetensors file: its header would be {length} bytes long",
                "Git LFS leaves such files when the weights themselves were not fetched.",
            )
        self._data_start = LENGTH_BYTES + length
        if self._data_start > size:
            raise CheckpointError(
                f"{file} is truncated: {self._data_start} bytes expected for the header alone, "
                f"{size} found",
                "Download it again.",
            )
        text = np.empty(length, np.uint8)
        self._fill(text, LENGTH_BYTES, "header")
        header = parse_header(text.tobytes(), size - self._data_start, file)
        self.tensors = header.tensors
        self.metadata = header.metadata
        self._offsets = header.offsets
        # safetensors.torch.save_model stores one of several shared tensors, and says under the
        # names that it left out which one it kept.
        self.tied = {
            name: kept
            for name, kept in header.metadata.items()
            if kept in header.tensors and name not in header.tensors and name != "format"
        }
        self.notes = ()

    def read(self, name: str, start: int, out: FloatArray) -> None:
        """Decode a range; see `TensorFile`."""
        info = self.tensors[name]
        check_range(info, start, start + out.size)
        storage = info.dtype.storage
        position = self._data_start + self._offsets[name] + start * storage.itemsize
        if storage == out.dtype:
            self._fill(out.view(np.uint8), position, name)
            return
        scratch = _thread_scratch()
        step = scratch.size // storage.itemsize
        for begin in range(0, out.size, step):
            piece = out[begin : begin + step]
            stored = scratch[: piece.size * storage.itemsize]
            self._fill(stored, position + begin * storage.itemsize, name)
            decode(stored.view(storage), piece)

    def read_stored(
        self, name: str, start: int, stop: int, out: StorageArray | None = None
    ) -> StorageArray:
        """Copy a range as stored; see `TensorFile`."""
        info = self.tensors[name]
        check_range(info, start, stop)
        array = np.empty(stop - start, info.dtype.storage) if out is None else out
        position = self._data_start + self._offsets[name] + start * info.dtype.itemsize
        self._fill(array.view(np.uint8), position, name)
        if info.dtype is Dtype.BOOL:
            # numpy takes any byte for granted in a bool, and would pass on one that is not 0 or 1.
            np.not_equal(array.view(np.uint8), 0, out=array)
        return array

    def close(self) -> None:
        """Release the file. Closing twice is allowed."""
        # The number may soon stand for another file.
        self._descriptor = -1
        self._release()

    def _fill(self, memory: StorageArray, position: int, what: str) -> None:
        """Fill `memory` with the file's bytes from `position` on. The system may give fewer."""
        done = 0
        view = memory.data
        while done < memory.size:
            try:
                count = os.preadv(self._descriptor, [view[done:]], position + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path}: cannot read {what!r}: {error.strerror}"
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ends at byte {position + done}, inside {what!r}: it was "
                    "changed or cut since it was opened",
                    "Leave model files alone while Isthmus reads them.",
                )
            done += count


def _thread_scratch() -> StorageArray:
    if not hasattr(_scratch, "bytes"):
        _scratch.bytes = np.empty(_SCRATCH_BYTES, np.uint8)
    scratch: StorageArray = _scratch.bytes
    return scratch
