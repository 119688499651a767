"""How far a merged encoder's features are from the experts', on calibration examples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from isthmus.lab.encoders import Encoder


class FeatureDistance:
    """Squared distance of features from those of each example's own expert, every task alike.

    Args:
        base: The base encoder.
        experts: Folder by task.
        examples: Calibration examples by task.
        lengths: Tokens of a text that are read, by task.
    """

    def __init__(
        self,
        base: Encoder,
        experts: Mapping[str, Path],
        examples: Mapping[str, Sequence[str]],
        lengths: Mapping[str, int],
    ) -> None:
        self._examples = examples
        self._lengths = lengths
        self._targets: dict[str, Tensor] = {
            task: base.reopened(folder).features(examples[task], lengths[task])
            for task, folder in experts.items()
        }
        self._initial = self._distance(base)

    def captured(self, encoder: Encoder) -> float:
        """1 - distance / distance of the base."""
        return 1 - self._distance(encoder) / self._initial

    def _distance(self, encoder: Encoder) -> float:
        total = 0.0
        for task, target in self._targets.items():
            features = encoder.features(self._examples[task], self._lengths[task])
            total += float((features - target).double().square().sum()) / len(target)
        return total
