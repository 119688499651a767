"""Tokens and their ids, enough to tell whether two models read text the same way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isthmus.checkpoints.base import Checkpoint

_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")


def differing_tokens(one: Checkpoint, other: Checkpoint) -> int | None:
    """How many tokens have different ids in two models, or are in one alone.

    Merged embeddings mean something only if this is zero.

    Returns:
        The count, or None when it cannot be told: a model brings no vocabulary that can be read,
        or the two keep it in files of different kinds.
    """
    for name in _FILES:
        here, there = _file(one, name), _file(other, name)
        if here is None or there is None:
            continue
        if here.read_bytes() == there.read_bytes():
            return 0
        ours, theirs = _tokens(here), _tokens(there)
        if ours is not None and theirs is not None:
            return sum(ours.get(token) != theirs.get(token) for token in ours.keys() | theirs)
    return None


def _file(model: Checkpoint, name: str) -> Path | None:
    folder = model.path if model.path.is_dir() else model.path.parent
    path = folder / name
    return path if path.is_file() else None


def _tokens(path: Path) -> dict[str, int] | None:
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".txt":
        return {token: number for number, token in enumerate(text.splitlines())}
    try:
        content = json.loads(text)
    except ValueError:
        return None
    return _from_json(content)


def _from_json(content: Any) -> dict[str, int] | None:
    """`vocab.json` is the mapping itself; `tokenizer.json` keeps it under `model`."""
    if not isinstance(content, dict):
        return None
    if "model" not in content:
        return content if all(isinstance(number, int) for number in content.values()) else None
    vocabulary = content["model"].get("vocab") if isinstance(content["model"], dict) else None
    if isinstance(vocabulary, list):  # a unigram model: [token, score] in the order of the ids
        return {entry[0]: number for number, entry in enumerate(vocabulary)}
    if not isinstance(vocabulary, dict):
        return None
    added = content.get("added_tokens", [])
    return vocabulary | {token["content"]: token["id"] for token in added}
