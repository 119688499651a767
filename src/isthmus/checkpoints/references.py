"""What a model's name in a recipe stands for: a folder, a file, the Hub, a model with an adapter."""

from __future__ import annotations

import difflib
from pathlib import Path

from isthmus.checkpoints.base import Checkpoint
from isthmus.checkpoints.folder import open_file, open_folder
from isthmus.errors import CheckpointError


def open_checkpoint(reference: str, *, root: Path | None = None) -> Checkpoint:
    """Open a model without loading it.

    Args:
        reference: A folder, a file, or a model on the Hub such as `org/name` or
            `org/name@revision`. What exists on this machine comes before the Hub; a path that
            begins with `.`, `/` or `~`, or has not exactly one slash, never goes there. A LoRA
            adapter follows after a plus sign: `base+adapter`.
        root: The folder from which relative paths count, before the current one.

    Raises:
        CheckpointError: if there is no such model, or it is damaged or of a kind that cannot be
            merged.
    """
    local = find_local(reference, root)
    if local is not None:
        return _open_path(local, reference)
    raise _missing(reference, root)


def find_local(reference: str, root: Path | None) -> Path | None:
    """The existing file or folder that a reference names, if any."""
    path = Path(reference).expanduser()
    for candidate in (root / path if root else path, path):
        if candidate.exists():
            return candidate
    return None


def _open_path(path: Path, label: str) -> Checkpoint:
    return open_folder(path, label) if path.is_dir() else open_file(path, label)


def _missing(reference: str, root: Path | None) -> CheckpointError:
    """The error for a path that does not exist, with names near it."""
    path = Path(reference).expanduser()
    near: list[str] = []
    for candidate in (root / path if root else path, path):
        if candidate.parent.is_dir():
            names = [entry.name for entry in candidate.parent.iterdir()]
            near += difflib.get_close_matches(candidate.name, names)
    cure = f"Near it: {', '.join(dict.fromkeys(near))}." if near else None
    return CheckpointError(f"there is no model at {reference}", cure)
