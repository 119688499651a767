"""What `isthmus lab adapters` does, in numbers; light enough to import for a command's help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from isthmus.lab.settings import FineTuning, Sizes
from isthmus.lab.suite import SuiteSettings

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


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(SuiteSettings):
    """Everything that decides the numbers of the suite.

    Attributes:
        lora: Which adapter is trained.
    """

    sizes: Mapping[str, Sizes] = field(default_factory=lambda: dict(ADAPTER_SIZES))
    lora: Lora = Lora()
    fine_tuning: FineTuning = TRAINING

    @classmethod
    def vision(cls, seeds: tuple[int, ...]) -> AdapterSettings:
        """The settings of the vision family."""
        modules = r"layers\.\d+\.(attention\.[qkvo]_proj|mlp\.fc[12])"
        return cls(
            family="vision", seeds=seeds, sizes=dict(VISION_SIZES), lora=Lora(modules=modules)
        )
