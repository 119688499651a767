"""What `isthmus lab projection` does to its encoders, in numbers; light enough to import for help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from isthmus.lab.adapters_settings import ADAPTER_SIZES, VISION_SIZES
from isthmus.lab.settings import DemoSettings, FineTuning, Sizes

TEXT_TRAINING = FineTuning(epochs=1, batch_size=16, learning_rate=1e-4)
VISION_TRAINING = FineTuning(epochs=5, batch_size=32, learning_rate=3e-4)
"""How experts are trained: all layers, embeddings excepted."""


@dataclass(frozen=True)
class ProjectionSettings:
    """Everything that decides the numbers of the experiments with encoders.

    Attributes:
        family: ``text`` or ``vision``.
        seeds: Each fixes the draw of the examples, the order of training, the draw of the
            calibration examples and the draws of random methods.
        sizes: By task, two at least.
        fine_tuning: How experts are trained; its seed is replaced by each of `seeds`.
        calibration: How many training examples of a task each expert is calibrated on.
        inverse_penalty: ``C`` of the linear probes that serve as heads.
        tries: How many settings a method that has any may look at on validation; three at least.
        threads: Threads that torch computes with.
    """

    family: Literal["text", "vision"] = "text"
    seeds: tuple[int, ...] = (0, 1, 2)
    sizes: Mapping[str, Sizes] = field(default_factory=lambda: dict(ADAPTER_SIZES))
    fine_tuning: FineTuning = TEXT_TRAINING
    calibration: int = 128
    inverse_penalty: float = 1.0
    tries: int = 6
    threads: int = 2

    @classmethod
    def vision(cls, seeds: tuple[int, ...]) -> ProjectionSettings:
        """The settings of the vision family."""
        return cls("vision", seeds, dict(VISION_SIZES), VISION_TRAINING)

    def quick(self) -> ProjectionSettings:
        """The same with a fifth of the examples and half of the tries: to see it run."""
        return replace(
            self,
            sizes={
                task: Sizes(size.train // 5, size.validation // 5, size.test // 5, size.max_length)
                for task, size in self.sizes.items()
            },
            tries=3,
        )

    def at(self, seed: int) -> DemoSettings:
        """What heads and experts of one seed are trained with."""
        return DemoSettings(
            sizes=self.sizes,
            fine_tuning=replace(self.fine_tuning, seed=seed),
            inverse_penalty=self.inverse_penalty,
            seed=seed,
            threads=self.threads,
        )
