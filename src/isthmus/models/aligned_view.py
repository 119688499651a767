"""A checkpoint in another's coordinates: its tensors move when they are read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from isthmus.checkpoints import Checkpoint
from isthmus.checkpoints.base import SourceFile
from isthmus.errors import SymmetryError
from isthmus.models.alignment import Alignment
from isthmus.models.checkpoint_tensors import CheckpointTensors
from isthmus.models.matched import Batch
from isthmus.typing import FloatArray, StorageArray

_KEPT = 8
"""Tensors that stay in memory, since chunks of one are read one after another."""


class AlignedView(Checkpoint):
    """Another checkpoint's names, formats and configuration, its numbers after an alignment.

    Args:
        moved: The checkpoint; it stays open when this closes.
        reference: The one that it is moved next to.
        batches: Data to match on, if any.
        files: Where the data is from; a plan is another one if they change.

    Attributes:
        moved: As given.
        reference: As given.
        batches: As given.
        alignment: How it moves; numbers can be read once it is there.
    """

    def __init__(
        self,
        moved: Checkpoint,
        reference: Checkpoint,
        batches: Sequence[Batch] = (),
        files: tuple[SourceFile, ...] = (),
    ) -> None:
        self.label = moved.label
        self.path = moved.path
        self.tensors = moved.tensors
        self.tied = moved.tied
        self.tied_by_file = moved.tied_by_file
        self.config = moved.config
        self.rewritten = moved.rewritten
        self.sources = moved.sources + files
        self.notes = moved.notes
        self.computed = frozenset(n for n, info in moved.tensors.items() if info.dtype.is_float)
        self.moved, self.reference, self.batches = moved, reference, batches
        self.alignment: Alignment | None = None
        self._plain = CheckpointTensors(moved)
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, name: str, start: int, out: FloatArray) -> None:
        """Numbers in the reference's coordinates; see `Checkpoint`.

        Raises:
            SymmetryError: The alignment is not known yet.
        """
        if name not in self.computed:
            self.moved.read(name, start, out)
            return
        flat = self._tensor(name).reshape(-1)[start : start + out.size]
        out[...] = np.asarray(flat.numpy(), dtype=out.dtype)

    def _tensor(self, name: str) -> Tensor:
        with self._lock:
            found = self._kept.get(name)
            if found is not None:
                self._kept.move_to_end(name)
                return found
            if self.alignment is None:
                raise SymmetryError(
                    f"{self.label} is not aligned yet to {self.reference.label}",
                    "Its numbers can be read once the merge has begun.",
                )
            of_reference = {own: here for here, own in self.alignment.names.items()}
            tensor = self._plain[name]
            # What the reference lacks stays; merges say what becomes of it.
            if name in of_reference:
                element = self.alignment.matching.element
                tensor = self.alignment.spec.act_on(element, of_reference[name], tensor)
            self._kept[name] = tensor.contiguous()
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
            return self._kept[name]

    def read_stored(
        self, name: str, start: int, stop: int, out: StorageArray | None = None
    ) -> StorageArray:
        """A range, rounded to the stored format; see `Checkpoint`."""
        if name not in self.computed:
            return self.moved.read_stored(name, start, stop, out)
        return self._read_rounded(name, start, stop, out)

    def close(self) -> None:
        """The models belong to others."""
