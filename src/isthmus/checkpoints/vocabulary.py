"""Tokens and their ids, enough to tell whether two models read text the same way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isthmus.checkpoints.base import Checkpoint
from isthmus.checkpoints.regular import read_regular
from isthmus.errors import CheckpointError

_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")


def differing_tokens(one: Checkpoint, other: Checkpoint) -> int | None:
    """How many tokens have different ids in two models, or are in one alone.

    Merged embeddings mean something only if this is zero.

    Returns:
        The count, or None when it cannot be told: a model brings no vocabulary that can be read,
        or the two keep it in files of different kinds.
    """
    for name in _FILES:
        here, there = _content(one, name), _content(other, name)
        if here is None or there is None:
            continue
        if here == there:
            return 0
        ours, theirs = _tokens(here, name), _tokens(there, name)
        if ours is not None and theirs is not None:
            return sum(ours.get(token) != theirs.get(token) for token in ours.keys() | theirs)
    return None


def _content(model: Checkpoint, name: str) -> bytes | None:
    if model.path is None:
        return None
    folder: Path = model.path if model.path.is_dir() else model.path.parent
    try:
        return read_regular(folder / name)
    except CheckpointError:
        return None


def _tokens(content: bytes, name: str) -> dict[str, int] | None:
    text = content.decode("utf-8", errors="replace")
    if name.endswith(".txt"):
        return {token: number for number, token in enumerate(text.splitlines())}
    try:
        return _from_json(json.loads(text))
    except (ValueError, RecursionError):
        return None


def _from_json(content: Any) -> dict[str, int] | None:
    """`vocab.json` is the mapping itself; `tokenizer.json` keeps it under `model`."""
    if not isinstance(content, dict):
        return None
    model, added = content.get("model"), content.get("added_tokens", [])
    if not isinstance(model, dict):  # "model" is a word too
        return _checked(content)
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):  # a unigram model: [token, score] in the order of the ids
        if not all(isinstance(entry, list) and _is_text(entry[:1]) for entry in vocabulary):
            return None
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    if not isinstance(vocabulary, dict) or not isinstance(added, list):
        return None
    if not all(isinstance(token, dict) and _is_text([token.get("content")]) for token in added):
        return None
    return _checked(vocabulary | {token["content"]: token.get("id") for token in added})


def _is_text(values: list[Any]) -> bool:
    return len(values) == 1 and isinstance(values[0], str)


def _checked(vocabulary: dict[str, Any]) -> dict[str, int] | None:
    return vocabulary if all(type(number) is int for number in vocabulary.values()) else None
