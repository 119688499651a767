"""The recipes that both tools merge: every method, with every parameter that both heed.

`density` for task_arithmetic, which both take and ignore, is with the differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """A recipe without its models.

    Attributes:
        method: The merge method.
        what: What is special about it.
        shared: Parameters of the whole merge.
        own: Parameters of each model; there are as many models as entries.
    """

    method: str
    what: str
    own: Sequence[dict[str, Any]]
    shared: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.method}: {self.what}"

    def recipe(self, family: Sequence[Path]) -> dict[str, Any]:
        """The recipe for a family, the base first."""
        base, *experts = map(str, family)
        models = [
            {"model": model} | ({"parameters": own} if own else {})
            for model, own in zip(experts, self.own, strict=False)
        ]
        if self.method == "slerp":
            # mergekit wants both ends listed.
            models.insert(0, {"model": base})
        return (
            {"merge_method": self.method, "models": models, "dtype": "float32"}
            | ({} if self.method in ("linear", "passthrough") else {"base_model": base})
            | ({"parameters": self.shared} if self.shared else {})
        )


def _weights(*weights: Any) -> list[dict[str, Any]]:
    return [{"weight": weight} for weight in weights]


def _weights_and_densities(*pairs: tuple[Any, Any]) -> list[dict[str, Any]]:
    return [{"weight": weight, "density": density} for weight, density in pairs]


RISING = [0.1, 0.4, 1.0]
FALLING = [1.0, 0.2]
BY_NAME = [
    {"filter": "att", "value": [0.2, 0.9]},
    {"filter": "bias", "value": 0.7},
    {"value": 0.4},
]

CASES = [
    Case("linear", "equal weights", _weights(1, 1, 1)),
    Case("linear", "unequal weights", _weights(0.2, 0.5, 0.9)),
    Case("linear", "a negative weight", _weights(1.2, -0.5, 0.6)),
    Case("linear", "not normalised", _weights(0.3, -0.2, 0.6), {"normalize": False}),
    Case("linear", "gradients and filters", _weights(RISING, FALLING, BY_NAME)),
    Case("task_arithmetic", "plain", _weights(0.4, 0.7, 0.2)),
    Case("task_arithmetic", "a negative weight, lambda", _weights(1, -0.5, 0.3), {"lambda": 0.6}),
    Case("task_arithmetic", "normalised", _weights(0.4, 1.0, -0.3), {"normalize": True}),
    Case(
        "task_arithmetic",
        "gradients and filters",
        _weights(RISING, FALLING, BY_NAME),
        {"lambda": [0.5, 1.5]},
    ),
    *(
        Case("ties", f"density {density}", [{"weight": 1, "density": density}] * 3)
        for density in (0.2, 0.5, 0.9)
    ),
    Case("ties", "no trim", _weights(0.5, 1.0, 0.8)),
    Case(
        "ties",
        "summed, lambda",
        _weights_and_densities((0.5, 0.2), (1, 0.4), (0.7, 0.7)),
        {"normalize": False, "lambda": 0.7},
    ),
    Case("ties", "a negative weight", _weights_and_densities((1, 0.3), (-0.6, 0.5), (0.8, 0.4))),
    Case(
        "ties",
        "rescaled",
        _weights_and_densities((0.5, 0.2), (1, 0.4), (0.7, 0.7)),
        {"rescale": True},
    ),
    Case(
        "ties",
        "gradients and filters",
        _weights_and_densities((RISING, FALLING), (1, BY_NAME), (BY_NAME, 0.3)),
    ),
    Case("slerp", "t 0.3", [{}], {"t": 0.3}),
    Case("slerp", "the ends", [{}], {"t": [{"filter": "att", "value": 0}, {"value": 1}]}),
    Case("slerp", "gradients and filters", [{}], {"t": BY_NAME}),
    Case("passthrough", "plain", [{}]),
    Case(
        "passthrough",
        "scaled by gradients and filters",
        [{"scale": [{"filter": "att", "value": [0, 0.5, 2]}, {"filter": "bias", "value": 1.5}]}],
    ),
]
