"""Folders and files that are made once for given settings, and never left half made."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

RECORD = "made_from.json"


def content_key(settings: Mapping[str, Any]) -> str:
    """A SHA-256 over everything that a result depends on.

    Args:
        settings: JSON values only; their order does not count.
    """
    text = json.dumps(settings, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def file_hash(path: Path) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_made(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether a folder is complete and was made from these very settings."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("key") == content_key(settings)


def share_files(folder: Path) -> None:
    """Give the files in a folder the permissions that new files have here.

    safetensors writes through temporary files, which only their owner may read.
    """
    probe = folder / ".permissions"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def make_folder(folder: Path, settings: Mapping[str, Any], fill: Callable[[Path], None]) -> None:
    """Make a folder afresh: filled elsewhere, recorded, and only then put in place.

    A run that is killed leaves a folder with another name, which the next run removes.

    Args:
        folder: Where the result goes; what lies there is replaced.
        settings: What it depends on; recorded beside the result.
        fill: Writes the result into the folder that it is given.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    fill(partial)
    share_files(partial)
    record = {"key": content_key(settings), "settings": settings}
    (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait until no other process makes a folder, and hold it against others meanwhile.

    The lock is a file beside it, since making replaces the folder itself; it ends with the process.

    Args:
        folder: That is to be made, or was.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
