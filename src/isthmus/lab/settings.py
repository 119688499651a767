"""What the demo does, in numbers; light enough to import for a command's help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class FineTuning:
    """How an expert is trained.

    Attributes:
        epochs: Passes over the training part.
        batch_size: Examples per step.
        learning_rate: Peak rate of AdamW, reached after a tenth of the steps and then lowered to
            zero linearly.
        weight_decay: Decoupled weight decay.
        seed: Fixes the order of the examples.
    """

    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 7e-5
    weight_decay: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class Sizes:
    """How many examples a task has, and where its texts are cut.

    Attributes:
        train: Examples that the head and the expert learn from.
        validation: Examples that merge coefficients are chosen on.
        test: Examples that accuracies are reported on.
        max_length: Tokens of a text that are read.
    """

    train: int
    validation: int
    test: int
    max_length: int


SIZES: Mapping[str, Sizes] = MappingProxyType(
    {
        "movies": Sizes(train=2000, validation=150, test=500, max_length=40),
        "news": Sizes(train=600, validation=150, test=500, max_length=32),
        "tweets": Sizes(train=3000, validation=150, test=500, max_length=40),
    }
)
"""Chosen so that the whole demo takes five to six minutes on two quiet cores."""


@dataclass(frozen=True)
class DemoSettings:
    """Everything that decides the demo's numbers.

    Attributes:
        sizes: By task: ``movies``, ``news``, ``tweets`` or some of them, two at least.
        fine_tuning: How experts are trained.
        inverse_penalty: ``C`` of the linear probe.
        seed: Fixes the draw of the examples.
        threads: Threads that torch computes with.
    """

    sizes: Mapping[str, Sizes] = field(default_factory=lambda: dict(SIZES))
    fine_tuning: FineTuning = FineTuning()
    inverse_penalty: float = 1.0
    seed: int = 0
    threads: int = 2
