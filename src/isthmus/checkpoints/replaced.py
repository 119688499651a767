"""What adapters store in full, seen as a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.checkpoints.adapter import Adapter
from isthmus.checkpoints.base import Checkpoint, TensorInfo
from isthmus.typing import FloatArray, StorageArray


class ReplacedTensors(Checkpoint):
    """The tensors that an adapter replaces (`modules_to_save`, trained biases), by the base's names.

    Args:
        adapter: Stays open; closing this does not close it.
        names: What the tensors are called here, and in the adapter.
    """

    def __init__(self, adapter: Adapter, names: Mapping[str, str]) -> None:
        self.label = adapter.label
        self.path = adapter.path
        self._stored = {name: adapter.replaced[own] for name, own in names.items()}
        self.tensors = {
            name: TensorInfo(name, stored.dtype, stored.shape)
            for name, stored in self._stored.items()
        }
        self.tied = {}
        self.tied_by_file = {}
        self.config = None
        self.sources = adapter.sources
        self.notes = ()
        self._adapter = adapter

    def read(self, name: str, start: int, out: FloatArray) -> None:
        """Decode a range; see `Checkpoint`."""
        self._adapter.read(self._stored[name], start, out)

    def read_stored(
        self, name: str, start: int, stop: int, out: StorageArray | None = None
    ) -> StorageArray:
        """A range as stored; see `Checkpoint`."""
        return self._read_rounded(name, start, stop, out)

    def close(self) -> None:
        """Nothing to release."""
