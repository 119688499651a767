"""Replacing small files in one step, so that nobody ever sees half of one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from isthmus.errors import OutputError


def atomic_write_bytes(path: Path, content: bytes) -> None:
    """Write a file so that it holds either its old content or all of the new one.

    It is on the disk when the function returns.

    Raises:
        OutputError: if it cannot be written; the old file, if any, is then untouched.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror}",
            "See that its folder exists, is yours, and has room.",
        ) from error


def atomic_write_text(path: Path, content: str) -> None:
    """Write a text in UTF-8 as `atomic_write_bytes` does.

    Raises:
        OutputError: if it cannot be written; the old file, if any, is then untouched.
    """
    atomic_write_bytes(path, content.encode("utf-8"))


def sync_folder(folder: Path) -> None:
    """Return when the names in a folder have reached the disk, renamed files in particular."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
