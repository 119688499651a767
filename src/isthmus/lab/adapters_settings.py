"""What `isthmus lab adapters` does, in numbers; light enough to import for a command's help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from isthmus.lab.settings import DemoSettings, FineTuning, Sizes

_VALIDATION, _TEST = 150, 500

ADAPTER_SIZES: Mapping[str, Sizes] = MappingProxyType(
    {
        "imdb": Sizes(1500, _VALIDATION, _TEST, max_length=48),
        "rotten_tomatoes": Sizes(2500, _VALIDATION, _TEST, max_length=40),
        "news": Sizes(900, _VALIDATION, _TEST, max_length=32),
        "tweets": Sizes(3000, _VALIDATION, _TEST, max_length=40),
        "spam": Sizes(1500, _VALIDATION, _TEST, max_length=32),
        "sections": Sizes(4000, _VALIDATION, _TEST, max_length=24),
    }
)
"""Chosen so that one seed's heads and adapters take some ten minutes of processor time."""


VISION_SIZES: Mapping[str, Sizes] = MappingProxyType(
    {
        task: Sizes(2000, _VALIDATION, _TEST, max_length=784)
        for task in ("mnist_low", "mnist_high", "fashion_low", "fashion_high")
    }
)
"""Pictures are not cut: all have 784 pixels."""

TRAINING = FineTuning(epochs=2, batch_size=32, learning_rate=1e-3, weight_decay=0.0)
"""How adapters are trained. Factors of a low rank bear a larger rate than whole matrices do."""


@dataclass(frozen=True)
class Lora:
    """Which adapter is trained.

    Attributes:
        rank: r of every module.
        alpha: The update is alpha / r times the product of the factors.
        modules: The adapted modules, as a regular expression for whole names: by default every
            linear map of MiniLM's layers.
    """

    rank: int = 16
    alpha: int = 32
    modules: str = r"encoder\.layer\.\d+\.(attention\.self\.(query|key|value)|.*\.dense)"


@dataclass(frozen=True)
class AdapterSettings:
    """Everything that decides the numbers of the suite.

    Attributes:
        family: ``text`` or ``vision``.
        seeds: Each fixes the draw of the examples, the start of the adapters, the order of their
            training and the draws of random methods.
        sizes: By task, two at least.
        lora: Which adapter is trained.
        fine_tuning: How; its seed is replaced by each of `seeds`.
        inverse_penalty: ``C`` of the linear probes that serve as heads.
        tries: How many settings every method may look at on validation; three at least.
        threads: Threads that torch computes with.
    """

    family: Literal["text", "vision"] = "text"
    seeds: tuple[int, ...] = (0, 1, 2)
    sizes: Mapping[str, Sizes] = field(default_factory=lambda: dict(ADAPTER_SIZES))
    lora: Lora = Lora()
    fine_tuning: FineTuning = TRAINING
    inverse_penalty: float = 1.0
    tries: int = 6
    threads: int = 2

    @classmethod
    def vision(cls, seeds: tuple[int, ...]) -> AdapterSettings:
        """The settings of the vision family."""
        modules = r"layers\.\d+\.(attention\.[qkvo]_proj|mlp\.fc[12])"
        return cls("vision", seeds, dict(VISION_SIZES), Lora(modules=modules))

    def quick(self) -> AdapterSettings:
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
        """What heads and adapters of one seed are trained with."""
        return DemoSettings(
            sizes=self.sizes,
            fine_tuning=replace(self.fine_tuning, seed=seed),
            inverse_penalty=self.inverse_penalty,
            seed=seed,
            threads=self.threads,
        )
