"""Merged layers and what is known about them, kept in a folder while a merge goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.checkpoints import atomic_write_text
from isthmus.checkpoints.safetensors_file import SafetensorsFile
from isthmus.errors import CheckpointError, OutputError
from isthmus.typing import FloatArray

MULTIPLIERS = "multipliers"
"""How a layer's task vectors are scaled, beside its tensors."""


class SolvedLayers:
    """A file of numbers and a record for every layer; a layer is there when both are whole.

    Args:
        folder: Made if it is missing; what lies there was left by the same merge.
        layers: The tensors of every layer, the weight first, by number.
    """

    def __init__(self, folder: Path, layers: Mapping[int, tuple[str, ...]]) -> None:
        self._folder = folder
        self._layer_of = {name: number for number, names in layers.items() for name in names}
        self._layers = layers
        folder.mkdir(parents=True, exist_ok=True)
        self._records: dict[int, dict[str, Any]] = {}
        for number in layers:
            path = self._path(number, "json")
            if path.exists():
                # What a damaged disk or somebody's hand has spoilt is made anew.
                with suppress(ValueError, CheckpointError):
                    record = json.loads(path.read_text(encoding="utf-8"))
                    SafetensorsFile(self._path(number, "safetensors")).close()
                    self._records[number] = record

    @property
    def complete(self) -> bool:
        """Whether every layer is there."""
        return len(self._records) == len(self._layers)

    @property
    def records(self) -> dict[int, dict[str, Any]]:
        """What is known, by the layers' numbers, in their order."""
        return {number: self._records[number] for number in sorted(self._records)}

    def has(self, number: int) -> bool:
        """Whether a layer is there."""
        return number in self._records

    def has_tensor(self, name: str) -> bool:
        """Whether the layer of a tensor is there."""
        return self._layer_of.get(name) in self._records

    def add(self, number: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
        """Keep a layer.

        Args:
            number: Of the layer.
            tensors: Its weight, and its bias if there is one, as in the output; `MULTIPLIERS` if they
                are of use.
            record: What is known about it, as JSON has it.

        Raises:
            OutputError: if it cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        path = self._path(number, "safetensors")
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())
            atomic_write_text(self._path(number, "json"), json.dumps(record))
        except (SafetensorError, OSError) as error:
            raise OutputError(
                f"{path} cannot be written: {error}", "See that its disk has room."
            ) from error
        self._records[number] = dict(record)

    def read(self, name: str, start: int, out: FloatArray) -> None:
        """Elements `start : start + out.size` of a tensor of a layer that is there."""
        with closing(SafetensorsFile(self._path(self._layer_of[name], "safetensors"))) as file:
            file.read(name, start, out)

    def multipliers(self, tensor: str) -> Tensor | None:
        """d⁽ᵏ⁾ of the layer of a tensor; None if it is not there, or was merged otherwise."""
        if not self.has_tensor(tensor):
            return None
        with closing(SafetensorsFile(self._path(self._layer_of[tensor], "safetensors"))) as file:
            info = file.tensors.get(MULTIPLIERS)
            if info is None:
                return None
            out = np.empty(info.numel, np.float64)
            file.read(MULTIPLIERS, 0, out)
        return torch.from_numpy(out).view(info.shape)

    def _path(self, number: int, ending: str) -> Path:
        return self._folder / f"layer-{number:05}.{ending}"
