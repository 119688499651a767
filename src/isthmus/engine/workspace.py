"""The output folder: whose it is, what lies there, and how a finished merge gets into it.

Everything is written under `OUT/.isthmus/` first. The finished files then move up by atomic
renames, the manifest last, so a folder without `.isthmus/` and with a manifest is complete, and
whatever else is found says how far a merge came.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from isthmus.checkpoints import atomic_write_text
from isthmus.checkpoints.locking import locked, not_writable
from isthmus.engine.manifest import MANIFEST, WORK, Manifest, read_manifest
from isthmus.errors import OutputError

DONE = ".isthmus-done"
"""What the work folder is renamed to before it is removed; a kill may leave parts of it."""

STATE = "state.json"
COMMIT = "commit.json"
STAGING = "files"
JOURNAL = "journal.jsonl"


@dataclass(frozen=True, slots=True)
class Workspace:
    """A folder in which one merge is being written.

    Attributes:
        out: The output folder.
        resumed: Whether an interrupted merge goes on here.
    """

    out: Path
    resumed: bool

    @property
    def work(self) -> Path:
        """Where everything lies until it is finished."""
        return self.out / WORK

    @property
    def staging(self) -> Path:
        """The output files to be."""
        return self.work / STAGING

    @property
    def journal(self) -> Path:
        """The list of finished tensors."""
        return self.work / JOURNAL

    def commit(self, files: Sequence[str]) -> None:
        """Move the finished files into place and remove the work folder.

        Files of the merge that is replaced go, unless the new one has them too.
        """
        old = _manifest_if_any(self.out)
        stale = sorted(set(old.files) - set(files)) if old else []
        moves = [*files, MANIFEST]
        # From here on a crash must end in the new output, not in a mixture.
        atomic_write_text(self.work / COMMIT, json.dumps({"move": moves, "remove": stale}))
        finish_commit(self.out)


def finish_commit(out: Path) -> None:
    """Do what `commit.json` says; what was done already is skipped.

    Raises:
        OutputError: if files cannot be moved.
    """
    work = out / WORK
    orders = _orders(out)
    try:
        for name in orders["remove"]:
            with suppress(FileNotFoundError, NotADirectoryError):
                _inside(out, name).unlink()
        for name in orders["move"]:
            source, target = _inside(work / STAGING, name), _inside(out, name)
            if source.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                source.replace(target)
        shutil.rmtree(out / DONE, ignore_errors=True)
        work.rename(out / DONE)
    except OSError as error:
        raise not_writable(out, error) from error
    shutil.rmtree(out / DONE, ignore_errors=True)


def complete_commit(out: Path) -> None:
    """If a merge was stopped while its finished files moved into place, move the rest.

    Raises:
        OutputError: if another process is at it, or files cannot be moved.
    """
    if is_committing(out):
        with locked(out, "another merge is being written to"):
            finish_commit(out)


def is_committing(out: Path) -> bool:
    """Whether a merge was stopped while its finished files moved into place."""
    return (out / WORK / COMMIT).is_file()


@contextmanager
def open_workspace(out: Path, digest: str, *, resume: bool, overwrite: bool) -> Iterator[Workspace]:
    """Claim an output folder for one merge and lock it.

    Args:
        out: The folder; made when missing.
        digest: Of the plan. An interrupted merge goes on only if it had the same.
        resume: Go on with an interrupted merge if there is one.
        overwrite: Replace a merge of ours, finished or not.

    Raises:
        OutputError: if the folder is somebody else's, in use, or cannot be written, or if it holds
            a merge and neither `resume` nor `overwrite` is given.
    """
    require_ours(out, allowed=overwrite or resume)
    with locked(out, "another merge is being written to"):
        work = out / WORK
        try:
            work.mkdir(exist_ok=True)
            resumed = _begin(work, digest, resume=resume)
        except OSError as error:
            raise not_writable(out, error) from error
        yield Workspace(out, resumed)


def _begin(work: Path, digest: str, *, resume: bool) -> bool:
    """Prepare the work folder; True if an interrupted merge goes on."""
    state = work / STATE
    if resume and state.is_file():
        if json.loads(state.read_text(encoding="utf-8"))["digest"] != digest:
            raise OutputError(
                f"the interrupted merge in {work.parent} had another recipe, other inputs or "
                "other options",
                f"Pass --overwrite to start anew. Removing {work} gives it up; a finished merge "
                "in the folder is whole.",
            )
        return True
    shutil.rmtree(work)
    (work / STAGING).mkdir(parents=True)
    atomic_write_text(state, json.dumps({"digest": digest}))
    return False


def is_finished(out: Path) -> bool:
    """Whether the folder holds a complete merge and none that is under way."""
    return _manifest_if_any(out) is not None and not (out / WORK).exists()


def require_ours(out: Path, *, allowed: bool) -> None:
    """Refuse a folder that holds anything that is not ours, or a merge, unless `allowed`.

    Raises:
        OutputError: naming what is in the way.
    """
    try:
        entries = {entry.name for entry in out.iterdir()}
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise OutputError(f"{out} is a file", "Name a folder for the output.") from error
    except OSError as error:
        raise not_writable(out, error) from error
    manifest = _manifest_if_any(out)
    ours = {WORK, DONE, MANIFEST} if manifest or {WORK, DONE} & entries else set()
    if manifest:
        ours |= {Path(name).parts[0] for name in manifest.files}
    if is_committing(out):
        ours |= {Path(name).parts[0] for name in _orders(out)["move"] + _orders(out)["remove"]}
    foreign = entries - ours
    if foreign:
        raise OutputError(
            f"{out} holds files that Isthmus did not write, such as {min(foreign)}",
            "Choose another folder; Isthmus never replaces what it did not write.",
        )
    if WORK in entries and not allowed:
        # Its lock tells a running merge from an interrupted one, and has its own message.
        with locked(out, "another merge is being written to"):
            raise OutputError(
                f"{out} holds an interrupted merge",
                "Pass --resume to go on with it, or --overwrite to start anew.",
            )
    if entries and not allowed:
        raise OutputError(f"{out} holds a merge already", "Pass --overwrite to replace it.")


def _orders(out: Path) -> dict[str, list[str]]:
    orders: dict[str, list[str]] = json.loads((out / WORK / COMMIT).read_text(encoding="utf-8"))
    return orders


def _manifest_if_any(out: Path) -> Manifest | None:
    try:
        return read_manifest(out)
    except OutputError:
        return None


def _inside(folder: Path, name: str) -> Path:
    """`folder / name`, for a relative name that stays inside.

    Raises:
        OutputError: if it does not.
    """
    path = Path(name)
    if path.is_absolute() or ".." in path.parts:
        raise OutputError(f"{folder}: the file name {name!r} leads outside the folder")
    return folder / path
