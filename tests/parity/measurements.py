"""What the comparison found, for benchmarks/results/parity.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Measurements:
    """Worst differences by method and model, the statistics of the random methods, and left-out ties."""

    worst: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    random: dict[str, dict[str, Any]] = field(default_factory=dict)
    excluded_ties: dict[str, Any] = field(default_factory=dict)

    def add(self, method: str, model: str, case: str, difference: float, tensors: int) -> None:
        entry = self.worst.setdefault(method, {}).setdefault(
            model, {"worst": 0.0, "recipes": 0, "tensors": tensors, "of": ""}
        )
        entry["recipes"] += 1
        if difference >= entry["worst"]:
            entry["worst"], entry["of"] = difference, case
