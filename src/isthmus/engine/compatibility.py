"""Whether models can be merged as they are, and if not, which tensors are in the way."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus.engine.matching import Matching
from isthmus.errors import PlanError

SHOWN = 6
"""Obstacles listed before the rest is only counted."""


def obstacles(matching: Matching, donor: str) -> Iterator[str]:
    """One sentence for each tensor that keeps the models from being merged whole."""
    for name, label, there, here in matching.misshapen:
        yield f"{name} has shape {list(there)} in {label} and {list(here)} in {donor}"
    for name, label in matching.missing:
        yield f"{name} is in {donor} and missing in {label}"
    for label, names in matching.dropped.items():
        for name in names:
            if name in matching.tied:
                kept = matching.tied[name]
                yield f"{name} has numbers of its own in {label}; {donor} ties it to {kept}"
            else:
                yield f"{name} is in {label} and missing in {donor}"


def require_mergeable(matching: Matching, donor: str) -> None:
    """Refuse models whose tensors do not all correspond.

    Raises:
        PlanError: naming tensors and models.
    """
    found = list(obstacles(matching, donor))
    if not found:
        return
    shown = [f"  - {text}" for text in found[:SHOWN]]
    if len(found) > SHOWN:
        shown.append(f"  - and {len(found) - SHOWN} more")
    raise PlanError(
        "the models do not have the same tensors:\n" + "\n".join(shown),
        "Merge models of one architecture and vocabulary, or write tensors: common in the recipe "
        f"to merge what all share and take the rest from {donor}.",
    )
