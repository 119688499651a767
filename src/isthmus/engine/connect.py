"""Connecting two models: files in, a report out, and what makes it resumable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.checkpoints import Checkpoint, atomic_write_bytes, atomic_write_text, open_checkpoint
from isthmus.checkpoints.vocabulary import differing_tokens
from isthmus.engine.progress import Progress, Silent
from isthmus.engine.stages import Stages
from isthmus.errors import OutputError, PathError

if TYPE_CHECKING:
    from isthmus.models.connection import Connection

RESULTS, STATE, WORK = "results.json", "bend.pt", "connect.json"


def connect(
    a: str,
    b: str,
    data: Path,
    out: Path,
    settings: Mapping[str, Any],
    *,
    column: str | None,
    examples: int,
    tokens: int,
    resume: bool,
    overwrite: bool,
    progress: Progress | None,
    write: Callable[[Connection, str, str, Path], None],
) -> Connection:
    """Run `connect_models` on two folders; see `isthmus.api.connect`.

    The bend that is being trained is kept in the output folder until the report is written.

    Args:
        a: The model that stays.
        b: The other one.
        data: Texts.
        out: The output folder.
        settings: Fields of `ConnectSettings`.
        column: Of the texts.
        examples: How many.
        tokens: Of each, at most.
        resume: Go on with an interrupted training.
        overwrite: Replace an earlier report.
        progress: Who listens.
        write: Writes the report into the folder.

    Raises:
        OutputError: The folder holds something else, or nothing of this kind to resume.
    """
    from isthmus.models.connection import ConnectSettings, connect_models
    from isthmus.models.data import calibration_batches

    asked = ConnectSettings(**settings)
    with open_checkpoint(a) as first, open_checkpoint(b) as second:
        if count := differing_tokens(first, second):
            raise PathError(
                f"{count:,} tokens have other ids in {b} than in {a}, so that rows of embeddings between them "
                "mean nothing",
                "Connect models with one tokenizer.",
            )
        digest = _digest(
            first,
            second,
            data,
            {**settings, "column": column, "examples": examples, "tokens": tokens},
        )
        state = _prepare(out, digest, resume=resume, overwrite=overwrite)
        listener = Stages(progress or Silent())
        try:
            batches = calibration_batches(
                first, data, column=column, examples=examples, tokens=tokens, seed=asked.seed
            )
            found = connect_models(
                first,
                second,
                batches,
                asked,
                state=state,
                keep=lambda new: _keep(out / STATE, new),
                told=listener,
            )
        except BaseException:
            _leave(out)
            raise
        finally:
            listener.finish()
    write(found, a, b, out)
    for name in (STATE, WORK):
        (out / name).unlink(missing_ok=True)
    return found


def _digest(first: Checkpoint, second: Checkpoint, data: Path, settings: Mapping[str, Any]) -> str:
    """Identifies what is done: models, data and settings."""
    status = data.stat() if data.exists() else None
    content = {
        "settings": dict(settings),
        "data": [str(data), None if status is None else [status.st_size, status.st_mtime_ns]],
        "models": [
            [str(source.path), source.size, source.modified_ns]
            for model in (first, second)
            for source in model.sources
        ],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _prepare(out: Path, digest: str, *, resume: bool, overwrite: bool) -> dict[str, Any] | None:
    """See that the folder may be used; the state of an interrupted training, if it is to go on."""
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file", "Name a folder.")
    begun = out / WORK
    if resume:
        if not begun.is_file():
            raise OutputError(
                f"{out} holds no interrupted run of isthmus connect", "Run it without --resume."
            )
        if begun.read_text(encoding="utf-8").strip() != digest:
            raise OutputError(
                f"{out} holds a run with other models, data or settings",
                "Give the same as before, or begin anew with --overwrite.",
            )
        return _kept(out / STATE)
    here = {path.name for path in out.iterdir()} if out.exists() else set()
    ours = {RESULTS, "report.html", STATE, WORK}
    if here - ours:
        raise OutputError(
            f"{out} holds {sorted(here - ours)[0]}, which isthmus connect did not write",
            "Name a new folder.",
        )
    if here and not overwrite:
        raise OutputError(
            f"{out} holds an earlier run",
            "Name a new folder, go on with --resume, or replace it with --overwrite.",
        )
    out.mkdir(parents=True, exist_ok=True)
    (out / STATE).unlink(missing_ok=True)
    atomic_write_text(begun, digest + "\n")
    return None


def _leave(out: Path) -> None:
    """Take back the beginning of a run that left nothing to go on with."""
    if not (out / STATE).is_file():
        (out / WORK).unlink(missing_ok=True)
        if not any(out.iterdir()):
            out.rmdir()


def _keep(path: Path, state: Mapping[str, Any]) -> None:
    import io

    import torch

    buffer = io.BytesIO()
    torch.save(state, buffer)
    atomic_write_bytes(path, buffer.getvalue())


def _kept(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    import torch

    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state
