"""Where activations wait between blocks: in memory, there in half of the room, or on disk."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from isthmus.errors import CalibrationError


class Keep(Enum):
    """How activations are kept between blocks."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    """Half of the room; three digits are kept."""
    DISK = "disk"
    """In float32 in files of the system's temporary folder, which TMPDIR names."""

    @property
    def dtype(self) -> torch.dtype:
        """The number format."""
        return torch.bfloat16 if self is Keep.BFLOAT16 else torch.float32


class States:
    """The hidden states of every batch, in float32 when they are asked for.

    Args:
        keep: How they are kept.
    """

    def __init__(self, keep: Keep) -> None:
        self._keep = keep
        self._kept: list[Tensor] = []
        # Removed with this object.
        self._folder = TemporaryDirectory(prefix="isthmus-") if keep is Keep.DISK else None

    def append(self, hidden: Tensor) -> None:
        """Keep those of one more batch."""
        self._kept.append(self._room(hidden))
        self[len(self._kept) - 1] = hidden

    def __setitem__(self, index: int, hidden: Tensor) -> None:
        """Replace those of a batch by others of the same or another shape."""
        if self._kept[index].shape != hidden.shape:
            self._kept[index] = self._room(hidden)
        self._kept[index].copy_(hidden)

    def __getitem__(self, index: int) -> Tensor:
        """Those of a batch."""
        return self._kept[index].float()

    def _room(self, hidden: Tensor) -> Tensor:
        if self._folder is None:
            return torch.empty_like(hidden, dtype=self._keep.dtype)
        path = Path(self._folder.name) / f"{len(list(Path(self._folder.name).iterdir()))}"
        size = hidden.numel() * self._keep.dtype.itemsize
        try:
            # Written, not only made longer: a map of a file without blocks dies where the disk is full.
            with path.open("wb") as file:
                for _ in range(0, size, _CHUNK):
                    file.write(bytes(min(_CHUNK, size - file.tell())))
        except OSError as error:
            raise CalibrationError(
                f"{path} cannot be written: {error.strerror}",
                "Activations go to the system's temporary folder: name another one by TMPDIR, or keep "
                "bfloat16.",
            ) from error
        mapped = torch.from_file(
            str(path), shared=True, size=hidden.numel(), dtype=self._keep.dtype
        )
        return mapped.view(hidden.shape)


_CHUNK = 1 << 22
