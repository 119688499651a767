"""A checkpoint at another's width: tensors grow when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.checkpoints import Checkpoint, align_names
from isthmus.errors import SymmetryError
from isthmus.models.checkpoint_tensors import CheckpointTensors, by_parameter, symmetries
from isthmus.models.equivalence import outputs_of, random_inputs, relative_error
from isthmus.models.network import empty_network
from isthmus.symmetry.architectures import Residual
from isthmus.symmetry.widening import growth, widened_tensor, wider_axes
from isthmus.typing import FloatArray, StorageArray

_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim")
"""What configurations call the units of an MLP."""

_TOLERANCE = 1e-9


class WidenedView(Checkpoint):
    """A checkpoint's names and formats, at the shapes of a wider one; it computes the same.

    Args:
        narrow: The checkpoint; it stays open when this closes.
        wide: The wider one.
        residual: The group of the residual stream.

    Attributes:
        narrow: As given.
        axes: Those that grew.

    Raises:
        SymmetryError: The symmetries of one are not known, or the two differ in more than the width of MLPs.
    """

    def __init__(self, narrow: Checkpoint, wide: Checkpoint, residual: Residual) -> None:
        self._small = symmetries(narrow, residual).spec
        large = symmetries(wide, residual).spec
        names = align_names(list(wide.tensors), list(narrow.tensors))
        self._large = replace(
            large, tensors={names.get(name, name): each for name, each in large.tensors.items()}
        )
        try:
            self.axes = wider_axes(self._small, self._large)
        except SymmetryError as error:
            raise SymmetryError(
                f"{narrow.label} next to {wide.label}: {error.problem}", error.cure
            ) from error
        shapes = {names[name]: info.shape for name, info in wide.tensors.items() if name in names}
        self.label, self.path = narrow.label, narrow.path
        self.tensors = {
            name: replace(info, shape=shapes.get(name, info.shape))
            for name, info in narrow.tensors.items()
        }
        self.tied, self.tied_by_file = narrow.tied, narrow.tied_by_file
        self.config = _at_width(narrow.config or {}, wide.config or {})
        self.rewritten = True
        self.sources, self.notes = narrow.sources, narrow.notes
        self.narrow = narrow
        self._plain = CheckpointTensors(narrow)
        grown = {n for n, info in narrow.tensors.items() if info.shape != self.tensors[n].shape}
        self.computed = frozenset(grown | narrow.computed)
        # What does not fit is told before anything is read.
        for name in grown:
            growth(
                name, narrow.tensors[name].shape, self._small, self._large, self.tensors[name].shape
            )
        floats = {n: info.shape for n, info in self.tensors.items() if info.dtype.is_float}
        symmetries(self, residual).spec.check(floats)

    def read(self, name: str, start: int, out: FloatArray) -> None:
        """Numbers of the wider shape; see `Checkpoint`."""
        if self.tensors[name].shape == self.narrow.tensors[name].shape:
            self.narrow.read(name, start, out)
            return
        flat = self._grown(name, self._plain[name]).reshape(-1)[start : start + out.size]
        out[...] = np.asarray(flat.numpy(), dtype=out.dtype)

    def read_stored(
        self, name: str, start: int, stop: int, out: StorageArray | None = None
    ) -> StorageArray:
        """A range, in the stored format; see `Checkpoint`."""
        if name not in self.computed:
            return self.narrow.read_stored(name, start, stop, out)
        return self._read_rounded(name, start, stop, out)

    def close(self) -> None:
        """The model belongs to others."""

    def check(self) -> float:
        """Run both networks on random inputs, in float64.

        Returns:
            The relative difference of their outputs.

        Raises:
            SymmetryError: They differ.
        """
        results = []
        for checkpoint in (self.narrow, self):
            network = empty_network(checkpoint)
            parameters = dict(CheckpointTensors(checkpoint, by_parameter(network, checkpoint)))
            inputs = random_inputs(checkpoint.config or {})
            results.append(outputs_of(network, parameters, inputs, torch.float64))
        error = relative_error(*results)
        if not error <= _TOLERANCE:
            raise SymmetryError(
                f"{self.label} computes something else at the greater width: its outputs differ by {error:.2g}",
                "Align networks of one width.",
            )
        return error

    def _grown(self, name: str, tensor: Tensor) -> Tensor:
        return widened_tensor(name, tensor, self._small, self._large, self.tensors[name].shape)


def at_width_of(moved: Checkpoint, reference: Checkpoint, residual: Residual) -> Checkpoint:
    """A checkpoint at another's width: itself where their shapes agree.

    Raises:
        SymmetryError: They differ in more than the width of MLPs, or the reference is the narrower one.
    """
    names = align_names(list(reference.tensors), list(moved.tensors))
    if all(
        moved.tensors[names[name]].shape == info.shape
        for name, info in reference.tensors.items()
        if name in names and info.dtype.is_float
    ):
        return moved
    return WidenedView(moved, reference, residual)


def _at_width(narrow: Mapping[str, Any], wide: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the other's widths."""
    own = {key: value for key, value in narrow.items() if key not in _WIDTHS}
    return {**own, **{key: wide[key] for key in _WIDTHS if key in wide}}
