"""What `isthmus lab projection` does to its encoders, in numbers; light enough to import for help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from isthmus.lab.adapters_settings import ADAPTER_SIZES, VISION_SIZES
from isthmus.lab.settings import FineTuning, Sizes
from isthmus.lab.suite import SuiteSettings

TEXT_TRAINING = FineTuning(epochs=1, batch_size=16, learning_rate=1e-4)
VISION_TRAINING = FineTuning(epochs=5, batch_size=32, learning_rate=3e-4)
"""How experts are trained: all layers, embeddings excepted."""


@dataclass(frozen=True, kw_only=True)
class ProjectionSettings(SuiteSettings):
    """Everything that decides the numbers of the experiments with encoders.

    Attributes:
        calibration: How many training examples of a task each expert is calibrated on.
    """

    sizes: Mapping[str, Sizes] = field(default_factory=lambda: dict(ADAPTER_SIZES))
    fine_tuning: FineTuning = TEXT_TRAINING
    calibration: int = 128

    @classmethod
    def vision(cls, seeds: tuple[int, ...]) -> ProjectionSettings:
        """The settings of the vision family."""
        return cls(
            family="vision", seeds=seeds, sizes=dict(VISION_SIZES), fine_tuning=VISION_TRAINING
        )
