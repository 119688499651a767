"""A merge seen as a checkpoint: named, shaped and configured as its donor, its numbers computed when read."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.checkpoints import Checkpoint
from isthmus.typing import StorageArray


class MergeView(Checkpoint):
    """What all views of a merge have in common; `read` is theirs.

    Args:
        donor: Gives names, shapes and configuration.
        experts: The models that are merged; donor and experts stay open when this closes.
    """

    def __init__(self, donor: Checkpoint, experts: Sequence[Checkpoint]) -> None:
        self.label = f"the merge of {', '.join(expert.label for expert in experts)}"
        self.path = donor.path
        self.tensors = donor.tensors
        self.tied = donor.tied
        self.tied_by_file = donor.tied_by_file
        self.config = donor.config
        self.sources = ()
        self.notes = ()
        self.computed = frozenset(donor.tensors)
        self._donor, self._experts = donor, experts

    def read_stored(
        self, name: str, start: int, stop: int, out: StorageArray | None = None
    ) -> StorageArray:
        """A range, rounded to the donor's format; see `Checkpoint`."""
        return self._read_rounded(name, start, stop, out)

    def close(self) -> None:
        """The models belong to others."""
