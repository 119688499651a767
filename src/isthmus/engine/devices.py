"""Where a merge runs: numpy on the processor, torch on anything else.

The methods are written once for both (array API). On the processor numpy starts faster than
torch, and chunks that stay in the cache leave nothing to gain.
"""

from __future__ import annotations

from typing import Protocol, cast

import numpy as np

from isthmus.errors import PlanError
from isthmus.typing import Array, FloatArray

CACHE_CHUNK = 1 << 18
"""Elements a chunk on the processor: rows of it stay in the shared cache, and the interpreter's lock,
which workers pass to each other a few times a chunk, changes hands seldom enough."""

DEVICE_CHUNK = 1 << 23
"""Elements a chunk on an accelerator: enough to hide the launch of an operation."""


class Device(Protocol):
    """Moves chunks to where the methods compute, and back."""

    chunk_size: int
    """Elements a chunk; fixed for a device, so that results do not depend on workers."""

    def put(self, values: FloatArray) -> Array:
        """The numbers on the device."""

    def get(self, values: Array) -> FloatArray:
        """The numbers as a numpy array."""


class Processor:
    """numpy."""

    chunk_size = CACHE_CHUNK

    def put(self, values: FloatArray) -> Array:
        """The same array."""
        return values

    def get(self, values: Array) -> FloatArray:
        """The same array."""
        return cast("FloatArray", values)


class Torch:
    """A torch device such as `cuda`, `cuda:1` or `mps`.

    Raises:
        PlanError: if torch cannot use the device here.
    """

    def __init__(self, name: str, chunk_size: int = DEVICE_CHUNK) -> None:
        import torch

        try:
            self._device = torch.device(name)
            torch.zeros(1, device=self._device).cpu().numpy()
        except (RuntimeError, AssertionError, ImportError, TypeError) as error:
            reason = str(error).splitlines()[0][:120]
            raise PlanError(
                f"the device {name!r} cannot be used: {reason}",
                "Use --device cpu, or one that torch finds on this machine.",
            ) from error
        self.chunk_size = chunk_size

    def put(self, values: FloatArray) -> Array:
        """Copy to the device."""
        import torch

        return torch.from_numpy(values).to(self._device, copy=True)

    def get(self, values: Array) -> FloatArray:
        """Copy back."""
        return cast("FloatArray", np.asarray(values.cpu()))


def open_device(name: str) -> Device:
    """`cpu` is numpy; everything else is torch's to understand."""
    return Processor() if name == "cpu" else Torch(name)
