"""What every file of tensors offers, whatever its format. A checkpoint is one or more of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from isthmus.checkpoints.base import SourceFile, TensorInfo
from isthmus.typing import FloatArray, StorageArray


class TensorFile(ABC):
    """One opened file of tensors. Reading is safe from several threads at once.

    Attributes:
        source: The file as it was when it was opened.
        tensors: Every tensor by name, in the order of the file.
        tied: Names that share their numbers with another tensor, and that tensor's name.
        notes: What the user should know about how the file was read.
    """

    source: SourceFile
    tensors: Mapping[str, TensorInfo]
    tied: Mapping[str, str]
    notes: tuple[str, ...]

    @abstractmethod
    def read(self, name: str, start: int, out: FloatArray) -> None:
        """Decode elements `start : start + out.size` of the flattened tensor into `out`.

        Raises:
            CheckpointError: if the file was changed or cut since it was opened.
            IndexError: if the tensor has no such elements.
        """

    @abstractmethod
    def read_stored(
        self, name: str, start: int, stop: int, out: StorageArray | None = None
    ) -> StorageArray:
        """A copy of elements `start : stop` of the flattened tensor, as stored.

        Args:
            name: A key of `tensors`.
            start: Offset of the first element, in elements.
            stop: Offset after the last.
            out: Where to put them; fresh memory without it.

        Raises:
            CheckpointError: if the file was changed or cut since it was opened.
            IndexError: if the tensor has no such elements.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the file. Closing twice is allowed."""


def check_range(info: TensorInfo, start: int, stop: int) -> None:
    """Raise IndexError unless `start : stop` lies inside the flattened tensor."""
    if not 0 <= start <= stop <= info.numel:
        raise IndexError(f"{info.name} has {info.numel} elements, not {start}:{stop}")
