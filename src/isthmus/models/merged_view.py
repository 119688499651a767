"""The merged model as far as it is known, for running it while it is being made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from isthmus.checkpoints import Checkpoint
from isthmus.errors import NonFiniteError
from isthmus.models.merge_view import MergeView
from isthmus.models.solved import SolvedLayers
from isthmus.typing import FloatArray


@dataclass(frozen=True, slots=True)
class Mean:
    """The weighted mean of one tensor.

    Attributes:
        names: What it is called in each expert.
        weights: One for each; their sum is not zero.
    """

    names: tuple[str, ...]
    weights: tuple[float, ...]


class MergedView(MergeView):
    """Solved layers from where they are kept, means of the experts' other tensors, and the rest of the donor.

    Args:
        donor: Gives names, shapes and configuration.
        experts: The models that are merged; they stay open when this closes.
        means: Tensors to average, by their name in the donor.

    Attributes:
        solved: The layers that are merged already; it may grow while this is read. None before the first.
    """

    def __init__(
        self,
        donor: Checkpoint,
        experts: Sequence[Checkpoint],
        means: Mapping[str, Mean],
    ) -> None:
        super().__init__(donor, experts)
        self.solved: SolvedLayers | None = None
        self._means = means

    def read(self, name: str, start: int, out: FloatArray) -> None:
        """Numbers as of now; see `Checkpoint`."""
        if self.solved is not None and self.solved.has_tensor(name):
            self.solved.read(name, start, out)
            return
        mean = self._means.get(name)
        if mean is None:
            self._donor.read(name, start, out)
            return
        row = np.empty_like(out)
        total = np.zeros(out.shape, np.float64)
        for expert, own, weight in zip(self._experts, mean.names, mean.weights, strict=True):
            expert.read(own, start, row)
            if not np.isfinite(row).all():
                raise NonFiniteError(
                    f"{expert.label}: tensor {own} holds NaN or infinity",
                    "A merge would spread it over the model. Leave this model out, or repair it.",
                )
            total += weight * row.astype(np.float64)
        out[...] = total / sum(mean.weights)
