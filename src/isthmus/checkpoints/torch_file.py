"""Reading torch's pickled files: `.bin`, `.pt`, `.pth`, `.tar`. Torch is imported when one opens.

Pickles can run code. They are loaded with `weights_only=True`, which builds tensors and plain
containers and refuses the rest. Files since torch 1.6 are mapped, so that opening loads nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.checkpoints.base import SourceFile
from isthmus.checkpoints.dtypes import copied, decode
from isthmus.checkpoints.regular import open_regular
from isthmus.checkpoints.tensor_file import TensorFile
from isthmus.checkpoints.torch_tensors import TensorTable, printable
from isthmus.errors import CheckpointError
from isthmus.typing import FloatArray, StorageArray

# Where trainers put the state dict, in the order in which they are tried.
_STATE_KEYS = ("state_dict", "model_state_dict", "model", "module")

_ZIP_SIGNATURE = b"PK\x03\x04"


class TorchFile(TensorFile):
    """An opened torch file.

    The state dict may lie under `state_dict`, `model_state_dict`, `model` or `module`, also one
    inside the other. Entries that are no tensors are left out, and noted.

    Args:
        path: The file.

    Raises:
        CheckpointError: if the file cannot be read, asks for code to be run, holds no state
            dict, or holds tensors that are sparse, quantised, or in an unknown number format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor, status = open_regular(path)
        with os.fdopen(descriptor, "rb") as file:
            mapped = file.read(len(_ZIP_SIGNATURE)) == _ZIP_SIGNATURE
        self.source = SourceFile.of(path, status)
        if status.st_size == 0:
            raise CheckpointError(f"{path} is empty", "Download it again.")
        state = _find_state(_load(path, mapped), path)
        notes = []
        if not mapped:
            notes.append(
                f"{path.name} is in torch's format of before 2020: all of it is in memory."
            )
        self._table = TensorTable(state, str(path))
        self.tensors = self._table.tensors
        self.tied = self._table.tied
        if self._table.others:
            others = ", ".join(self._table.others[:8])
            more = len(self._table.others) - 8
            others += f" and {more} more" if more > 0 else ""
            notes.append(f"{path.name}: left out what is no tensor: {others}.")
        self.notes = tuple(notes)

    def read(self, name: str, start: int, out: FloatArray) -> None:
        """Decode a range; see `TensorFile`."""
        decode(self._view(name, start, start + out.size), out)

    def read_stored(
        self, name: str, start: int, stop: int, out: StorageArray | None = None
    ) -> StorageArray:
        """Copy a range as stored; see `TensorFile`."""
        return copied(self._view(name, start, stop), out)

    def close(self) -> None:
        """Release the file. Closing twice is allowed."""
        self._table.clear()

    def _view(self, name: str, start: int, stop: int) -> StorageArray:
        self._check_unchanged()
        return self._table.view(name, start, stop)

    def _check_unchanged(self) -> None:
        # Reading mapped pages that a shortened file no longer has would kill the process.
        try:
            now = SourceFile.of(self.path, self.path.stat())
        except OSError as error:
            raise CheckpointError(f"{self.path} is gone: {error.strerror}") from error
        if now != self.source:
            raise CheckpointError(
                f"{self.path} was changed since it was opened",
                "Leave model files alone while Isthmus reads them.",
            )


def _load(path: Path, mapped: bool) -> Any:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # a damaged pickle can raise anything at all
        # Torch's message has the offending name after GLOBAL, and then advice to trust the file.
        forbidden = re.search(r"GLOBAL ([\w.]+)", str(error))
        if forbidden:
            raise CheckpointError(
                f"{path} asks to run {forbidden[1]}, which a file of weights has no need for; "
                "nothing was run",
                "If you trust its author, load it in torch and save the state dict alone.",
            ) from error
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{path} is not a file that torch can load: {reason}",
            "It may be damaged, or an old tar archive; download it again or save it anew.",
        ) from error


def _find_state(value: Any, path: Path) -> Mapping[Any, Any]:
    """The mapping from names to tensors, wherever the file keeps it."""
    import torch

    # As deep as one key inside each other one; a pickle may also contain itself.
    for _ in _STATE_KEYS:
        if isinstance(value, Mapping):
            inner = (value[key] for key in _STATE_KEYS if isinstance(value.get(key), Mapping))
            value = next(inner, value)
    if not isinstance(value, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(value).__name__}, not a state dict",
            "Save model.state_dict() instead.",
        )
    if not any(isinstance(entry, torch.Tensor) for entry in value.values()):
        keys = ", ".join(printable(key) for key in list(value)[:8]) or "nothing"
        raise CheckpointError(
            f"{path} holds no state dict: it holds {keys}",
            f"Save model.state_dict(), or put it under one of {', '.join(_STATE_KEYS)}.",
        )
    return value
