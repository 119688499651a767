"""A checkpoint's tensors as mathematics takes them, by its own names or its network's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.checkpoints import Checkpoint
from isthmus.errors import SymmetryError
from isthmus.models.network import Weights
from isthmus.symmetry.architectures import Architecture, Residual, architecture_of
from isthmus.typing import FloatArray


class CheckpointTensors(Mapping[str, Tensor]):
    """A checkpoint's floating-point tensors, each read when it is asked for.

    Args:
        checkpoint: Where they are.
        names: The name in the checkpoint for each name here; the checkpoint's own if None.
    """

    def __init__(self, checkpoint: Checkpoint, names: Mapping[str, str] | None = None) -> None:
        self._checkpoint = checkpoint
        given = {name: name for name in checkpoint.tensors} if names is None else names
        self.names = {
            here: name for here, name in given.items() if checkpoint.tensors[name].dtype.is_float
        }

    def __getitem__(self, name: str) -> Tensor:
        """In float32, or float64 where it is stored so."""
        own = self.names[name]
        info = self._checkpoint.tensors[own]
        out: FloatArray = (
            np.empty(info.numel, np.float64)
            if info.dtype.itemsize == 8
            else np.empty(info.numel, np.float32)
        )
        self._checkpoint.read(own, 0, out)
        return torch.from_numpy(out).reshape(info.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading it."""
        return self._checkpoint.tensors[self.names[name]].shape


def symmetries(checkpoint: Checkpoint, residual: Residual) -> Architecture:
    """The symmetries of a checkpoint, from its configuration.

    Raises:
        SymmetryError: There is no configuration, or it is of an unknown family.
    """
    if checkpoint.config is None:
        raise SymmetryError(
            f"{checkpoint.label} has no config.json, from which its symmetries would be known",
            "Name a folder in the Hub's layout. For networks of your own, isthmus.symmetry takes a Spec.",
        )
    tensors = CheckpointTensors(checkpoint)
    shapes = {name: tensors.shape(name) for name in tensors}
    try:
        return architecture_of(checkpoint.config, shapes, residual=residual)
    except SymmetryError as error:
        raise SymmetryError(f"{checkpoint.label}: {error.problem}", error.cure) from error


def by_parameter(network: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """The checkpoint's tensor for every parameter of its network; tied ones stand once.

    Args:
        network: As `empty_network` gives it.
        checkpoint: Its own.

    Raises:
        CalibrationError: A parameter has no tensor.
    """
    weights = Weights(network, checkpoint)
    return {name: weights.source(name) for name, _ in network.named_parameters()}
