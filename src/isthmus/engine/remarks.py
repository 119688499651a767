"""What came up while modules were merged, and how it is told: once, not once a module."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

ALL_KEPT = 1 - 1e-6
"""A share of energy from which recompression is worth no word."""


@dataclass(frozen=True, slots=True)
class Remarks:
    """What came up at one module.

    Attributes:
        subject: The module.
        texts: Sentences about it.
        energy: The squared Frobenius norm of its merged update.
        share: The share of its energy that recompression to the asked rank kept.
    """

    subject: str
    texts: tuple[str, ...]
    energy: float
    share: float

    def as_data(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def of_data(cls, data: dict[str, Any]) -> Remarks:
        """From what `as_data` gave."""
        return cls(**data | {"texts": tuple(data["texts"])})


def told(remarks: Iterable[Remarks]) -> list[str]:
    """Notes for the user, each text once with the modules that it is about."""
    ordered = sorted(remarks, key=lambda r: r.subject)
    subjects: dict[str, list[str]] = {}
    for remark in ordered:
        for text in remark.texts:
            subjects.setdefault(text, []).append(remark.subject)
    notes = [f"{text}: {some(names)}" for text, names in sorted(subjects.items())]
    kept = sum(r.energy for r in ordered)
    whole = sum(r.energy / r.share for r in ordered if r.share > 0)
    if ordered and kept < ALL_KEPT * whole:
        worst = min(ordered, key=lambda r: r.share)
        notes.append(
            f"cutting to the rank keeps {kept / whole:.1%} of the energy of the merged updates, least "
            f"in {worst.subject} with {worst.share:.1%}; `rank:` in the recipe sets a higher one"
        )
    return notes


def some(names: list[str], count: int = 4) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:count])
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"
