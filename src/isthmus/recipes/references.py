"""How a recipe names a model: `path[@revision][+adapter[@revision]]`, or the same as a mapping."""

from __future__ import annotations

from typing import Any

from isthmus.recipes.document import KeyPath
from isthmus.recipes.problems import Problems, nearest


def read_reference(raw: Any, path: KeyPath, problems: Problems) -> str | None:
    """A model as one line of text.

    Args:
        raw: Text, or a mapping with `model` and perhaps `lora`, each text or path and revision.
        path: Where the value is.
        problems: Takes what is wrong.

    Returns:
        The text, or None if something is wrong.
    """
    if isinstance(raw, dict) and "model" in raw:
        if not _known_keys(raw, ("model", "lora"), path, problems):
            return None
        model = _located(raw["model"], (*path, "model"), problems)
        if raw.get("lora") is None:
            return model
        lora = _located(raw["lora"], (*path, "lora"), problems)
        return f"{model}+{lora}" if model and lora else None
    return _located(raw, path, problems)


def _located(raw: Any, path: KeyPath, problems: Problems) -> str | None:
    """`path[@revision]`."""
    if isinstance(raw, dict):
        if not _known_keys(raw, ("path", "revision"), path, problems):
            return None
        parts = [raw.get("path"), raw.get("revision")]
        if parts[1] is None:
            return _text(parts[0], (*path, "path"), problems)
        where = _text(parts[0], (*path, "path"), problems)
        revision = _text(parts[1], (*path, "revision"), problems)
        return f"{where}@{revision}" if where and revision else None
    return _text(raw, path, problems)


def _text(raw: Any, path: KeyPath, problems: Problems) -> str | None:
    if isinstance(raw, str) and raw.strip():
        return raw
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        problems.add(path, f"{path[-1]} must be text, not the number {raw!r}; put it in quotes")
    else:
        problems.add(path, f"{path[-1]} must be text, not {raw!r}")
    return None


def _known_keys(
    raw: dict[str, Any], known: tuple[str, ...], path: KeyPath, problems: Problems
) -> bool:
    unknown = [key for key in raw if key not in known]
    for key in unknown:
        if key == "override_architecture":
            problems.add(
                (*path, key),
                f"{key} is not needed: tensors are matched by name, whatever the architecture",
                "Remove it.",
            )
            continue
        near = nearest(key, known)
        hint = f"; did you mean {near!r}?" if near else f"; a model has {' and '.join(known)}"
        problems.add((*path, key), f"unknown key {key!r} of a model{hint}")
    return not unknown
