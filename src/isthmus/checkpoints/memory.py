"""A state dict in memory, seen as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from isthmus.checkpoints.base import Checkpoint, TensorInfo
from isthmus.checkpoints.dtypes import copied, decode
from isthmus.checkpoints.torch_tensors import TensorTable, as_numpy
from isthmus.errors import CheckpointError
from isthmus.typing import FloatArray, StorageArray

if TYPE_CHECKING:
    import torch


class MemoryCheckpoint(Checkpoint):
    """A state dict in memory. Tensors on an accelerator are copied chunk by chunk when read.

    Args:
        label: What errors call it.
        state: Tensors by name.

    Raises:
        CheckpointError: if it is no mapping, or an entry is no tensor, or sparse, quantised, or
            without numbers.
    """

    def __init__(self, label: str, state: Mapping[str, torch.Tensor]) -> None:
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"{label} is a {type(state).__name__}, not a state dict",
                "Pass model.state_dict().",
            )
        self.label = label
        self.path = None
        self._table = TensorTable(state, label)
        if self._table.others:
            raise CheckpointError(
                f"{label}: {self._table.others[0]} is no tensor",
                "Pass model.state_dict().",
            )
        self.tensors = self._table.tensors
        self.tied = self._table.tied
        self.tied_by_file = self._table.tied
        self.config = None
        self.sources = ()
        self.notes = ()

    def read(self, name: str, start: int, out: FloatArray) -> None:
        """Decode a range; see `Checkpoint`."""
        decode(self._table.view(name, start, start + out.size), out)

    def read_stored(
        self, name: str, start: int, stop: int, out: StorageArray | None = None
    ) -> StorageArray:
        """Copy a range as stored; see `Checkpoint`."""
        return copied(self._table.view(name, start, stop), out)

    def close(self) -> None:
        """Nothing to release."""


class StateDictSink:
    """Collects finished tensors as a state dict on the processor.

    Args:
        tensors: What will come.
    """

    def __init__(self, tensors: Sequence[TensorInfo]) -> None:
        import torch

        self._tensors = {
            info.name: torch.empty(info.shape, dtype=getattr(torch, info.dtype.torch_name))
            for info in tensors
        }
        self._arrays = {
            info.name: as_numpy(self._tensors[info.name].view(-1), info.dtype) for info in tensors
        }

    def write(self, name: str, start: int, array: StorageArray) -> None:
        """Take elements of one tensor, in its storage type."""
        self._arrays[name][start : start + array.size] = array

    def state_dict(self, tied: Mapping[str, str]) -> dict[str, torch.Tensor]:
        """All tensors by name.

        Args:
            tied: Names to give to another tensor as well.
        """
        aliases = {name: self._tensors[kept] for name, kept in tied.items()}
        return self._tensors | aliases
