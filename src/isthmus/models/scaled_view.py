"""A merge that is a sum of task vectors, tensor by tensor, computed when it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from isthmus.checkpoints import Checkpoint
from isthmus.models.merge_view import MergeView
from isthmus.typing import FloatArray


class ScaledView(MergeView):
    """θ_0 + Σ_k d_k (θ_k − θ_0), with coefficients for each tensor, or the mean where it has none.

    Args:
        donor: θ_0; gives names, shapes and configuration.
        experts: θ_k; they stay open when this closes.
        names: What each expert calls a tensor, by its name in the donor. Others are the donor's.
        weights: Of the mean, one for each expert; their sum is not zero.

    Attributes:
        names: As given.
        coefficients: d_k by tensor; empty before they are known.
    """

    def __init__(
        self,
        donor: Checkpoint,
        experts: Sequence[Checkpoint],
        names: Mapping[str, Sequence[str]],
        weights: Sequence[float],
    ) -> None:
        super().__init__(donor, experts)
        self.names = names
        self.coefficients: Mapping[str, Sequence[float]] = {}
        self._shares = [weight / sum(weights) for weight in weights]

    def read(self, name: str, start: int, out: FloatArray) -> None:
        """Numbers of the merge; see `Checkpoint`."""
        self._donor.read(name, start, out)
        if name not in self.names:
            return
        base, total = out.astype(np.float64), out.astype(np.float64)
        row = np.empty_like(out)
        shares = self.coefficients.get(name, self._shares)
        for expert, own, share in zip(self._experts, self.names[name], shares, strict=True):
            expert.read(own, start, row)
            total += share * (row - base)
        out[...] = total
