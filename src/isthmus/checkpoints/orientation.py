"""Which way round a model stores the matrix of a linear module."""

from __future__ import annotations

from collections.abc import Mapping

from isthmus.checkpoints.base import TensorInfo


class Orientations:
    """Tells linear layers, [outputs, inputs], from GPT-2's Conv1D layers, [inputs, outputs].

    The length of a bias is the number of outputs, so a matrix that is not square betrays its
    order; square ones are taken to be stored like modules of the same name in the same model.

    Args:
        tensors: The model's tensors by name.
    """

    def __init__(self, tensors: Mapping[str, TensorInfo]) -> None:
        self._tensors = tensors
        self._by_kind: dict[str, set[bool]] = {}
        for name in tensors:
            module, _, part = name.rpartition(".")
            known = self._by_shape(module) if part == "weight" else None
            if known is not None:
                self._by_kind.setdefault(_kind(module), set()).add(known)

    def inputs_first(self, module: str) -> bool | None:
        """Whether the weight of a module is of shape [inputs, outputs]; None if nothing tells.

        Args:
            module: Its name, with a weight of two dimensions.
        """
        if f"{module}.bias" not in self._tensors:
            return False  # A Conv1D has a bias always.
        known = self._by_shape(module)
        if known is not None:
            return known
        votes = self._by_kind.get(_kind(module)) or set().union(*self._by_kind.values())
        return next(iter(votes)) if len(votes) == 1 else None

    def _by_shape(self, module: str) -> bool | None:
        weight = self._tensors.get(f"{module}.weight")
        bias = self._tensors.get(f"{module}.bias")
        if weight is None or bias is None or len(weight.shape) != 2 or len(bias.shape) != 1:
            return None
        rows, columns = weight.shape
        (outputs,) = bias.shape
        return None if rows == columns or outputs not in weight.shape else outputs == columns


def _kind(module: str) -> str:
    """The last part of a module's name: `c_proj`."""
    return module.rpartition(".")[2]
