"""How many models a method takes, and what to do about another number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isthmus.methods.method import BaseUse, Method
from isthmus.methods.registry import METHODS
from isthmus.recipes.schema import ModelEntry


def merged_entries(
    method: Method, base: str | None, entries: Mapping[int, ModelEntry]
) -> Mapping[int, ModelEntry]:
    """The entries that are merged: all, or those beside the base."""
    if method.base is BaseUse.IGNORED:
        return entries
    return {index: entry for index, entry in entries.items() if entry.model != base}


def wrong_count(method: Method, models: Sequence[str]) -> tuple[str, str] | None:
    """What is wrong with the number of merged models, and the cure; None if it is one that fits."""
    most = len(models) if method.max_experts is None else method.max_experts
    if method.min_experts <= len(models) <= most:
        return None
    measured = method.base is BaseUse.REQUIRED
    noun = "other model" if measured else "model"
    wanted = ("base_model and " if measured else "") + _count(method, noun)
    many = {0: "none is", 1: "one is"}.get(len(models), f"{len(models)} are")
    found = f"{many} listed: {', '.join(models)}" if models else f"{many} listed"
    return f"{method.name} takes {wanted}, but {found}", _cure(method, len(models))


def example(*lines: str) -> str:
    """The cure that shows what to add to the recipe."""
    return "\n    ".join(("Add:", *lines))


def _count(method: Method, noun: str) -> str:
    """How many models a method takes, in words."""
    least, most = method.min_experts, method.max_experts
    if most not in (None, least):
        return f"{least} to {most} {noun}s"
    bound = "at least" if most is None else "exactly"
    return f"{bound} one {noun}" if least == 1 else f"{bound} {least} {noun}s"


def _cure(method: Method, found: int) -> str:
    """What to do when a method takes more models than there are, or fewer."""
    if found < method.min_experts:
        return example("models:", "  - model: PATH")
    more = [
        other.name
        for other in METHODS.values()
        if other.base is method.base and other.max_experts is None
    ]
    if not more:
        more = [other.name for other in METHODS.values() if other.max_experts is None]
    return f"Remove the others, or take a method for many models: {', '.join(more)}."
