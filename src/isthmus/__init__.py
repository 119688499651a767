"""Isthmus merges neural networks, and says beforehand whether they will merge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.api import align, connect, extract, merge, plan
    from isthmus.engine.memory import merge_state_dicts
    from isthmus.recipes import load_recipe

__all__ = ["align", "connect", "extract", "load_recipe", "merge", "merge_state_dicts", "plan"]

_HOMES = {
    "align": "isthmus.api",
    "connect": "isthmus.api",
    "extract": "isthmus.api",
    "load_recipe": "isthmus.recipes",
    "merge": "isthmus.api",
    "merge_state_dicts": "isthmus.engine.memory",
    "plan": "isthmus.api",
}


def __getattr__(name: str) -> Any:
    # Lazily, so that `import isthmus` and `isthmus --help` answer at once.
    if name not in _HOMES:
        raise AttributeError(f"module 'isthmus' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
