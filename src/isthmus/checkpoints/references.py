"""What a model's name in a recipe stands for: a folder, a file, the Hub, a model with an adapter."""

from __future__ import annotations

import difflib
from pathlib import Path

from isthmus.checkpoints.adapted import AdaptedCheckpoint
from isthmus.checkpoints.adapter import ADAPTER_CONFIG, open_adapter
from isthmus.checkpoints.adapter_files import ADAPTER_WEIGHTS
from isthmus.checkpoints.base import Checkpoint
from isthmus.checkpoints.folder import open_file, open_folder, preferred_weights
from isthmus.checkpoints.hub import fetch, is_hub_reference
from isthmus.checkpoints.index import SAFETENSORS_INDEX
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
    path = _find(reference, root)
    if path is not None:
        return _open_model(path, reference)
    base, plus, adapter = reference.rpartition("+")
    if plus:
        return _open_adapted(base.strip(), adapter.strip(), reference, root)
    if reference != reference.strip():
        return open_checkpoint(reference.strip(), root=root)
    return _open_model(_fetch(reference, root), reference)


def find_adapter(reference: str, *, root: Path | None = None, fetching: bool = True) -> Path | None:
    """The folder of a LoRA adapter, if a reference names one and nothing else.

    Args:
        reference: As for `open_checkpoint`.
        root: The folder from which relative paths count, before the current one.
        fetching: Whether to look on the Hub too.

    Raises:
        CheckpointError: if the reference cannot be looked at, or not be fetched.
    """
    path = _find(reference, root)
    if path is None and fetching and is_hub_reference(reference):
        path = _fetch(reference, root)
    if path is None or not path.is_dir():
        return None
    names = {entry.name for entry in path.iterdir()}
    if ADAPTER_CONFIG not in names:
        if preferred_weights(names) is None and names & {*ADAPTER_WEIGHTS}:
            raise CheckpointError(
                f"{path} holds the weights of an adapter, but no {ADAPTER_CONFIG}",
                "Its scale is not known without. Download the adapter again.",
            )
        return None
    # A whole model may lie beside its adapter; and transformers names the index of an adapter's
    # shards as it names a model's.
    weights = preferred_weights(names)
    sharded = weights == SAFETENSORS_INDEX and not any(n.startswith("model-") for n in names)
    return path if weights is None or sharded else None


def _open_model(path: Path, label: str) -> Checkpoint:
    return open_folder(path, label) if path.is_dir() else open_file(path, label)


def _open_adapted(base: str, adapter: str, label: str, root: Path | None) -> Checkpoint:
    # The adapter first: it is the cheaper one to be wrong about.
    opened = open_adapter(_find(adapter, root) or _fetch(adapter, root), label=adapter)
    try:
        return AdaptedCheckpoint(open_checkpoint(base, root=root), opened, label=label)
    except BaseException:
        opened.close()
        raise


def _find(reference: str, root: Path | None) -> Path | None:
    """The existing file or folder that a reference names, if any."""
    if not reference:
        raise CheckpointError(
            "a model's name is empty", "Write a folder, a file, org/name, or base+adapter."
        )
    try:
        return next((path for path in _candidates(reference, root) if path.exists()), None)
    except OSError as error:
        raise CheckpointError(f"{reference:.200} cannot be looked at: {error.strerror}") from error


def _candidates(reference: str, root: Path | None) -> list[Path]:
    try:
        path = Path(reference).expanduser()
    except RuntimeError as error:  # a home of nobody
        raise CheckpointError(f"there is no model at {reference}: {error}") from error
    return [root / path, path] if root is not None else [path]


def _closest(name: str, names: list[str]) -> list[str]:
    """The names most like `name`, whatever their case."""
    by_lower = {other.lower(): other for other in names}
    return [by_lower[found] for found in difflib.get_close_matches(name.lower(), by_lower)]


def _fetch(reference: str, root: Path | None) -> Path:
    """The folder of what is not on this machine, or an error that suggests what is."""
    near: list[str] = []
    for path in _candidates(reference, root):
        try:
            names = [entry.name for entry in path.parent.iterdir()]
        except OSError:  # there is no such folder, or it is not ours to look into
            continue
        # As the user would write it: with the folders before it.
        folders = reference.rstrip("/").removesuffix(path.name)
        near += [folders + name for name in _closest(path.name, names)]
    advice = f"Near it: {', '.join(dict.fromkeys(near))}." if near else None
    if not is_hub_reference(reference):
        raise CheckpointError(
            f"there is no model at {reference}",
            advice or "Write an existing folder or file, or org/name for a model on the Hub.",
        )
    try:
        return fetch(reference)
    except CheckpointError as error:
        if advice is None:
            raise
        raise CheckpointError(error.problem, f"{error.cure} {advice}") from error
