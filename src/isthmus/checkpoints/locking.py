"""A folder that one process at a time writes to."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isthmus.errors import OutputError


@contextmanager
def locked(folder: Path, busy: str) -> Iterator[None]:
    """Hold a folder itself, made when missing, against others; the lock ends with the process.

    Args:
        folder: To be written to.
        busy: What to say of a folder that is held, in front of its name.

    Raises:
        OutputError: Somebody else holds it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise not_writable(folder, error) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(f"{busy} {folder}", "Wait for it, or stop it first.") from error
        yield
    finally:
        os.close(descriptor)


def not_writable(out: Path, error: OSError) -> OutputError:
    """What to say of a folder that cannot be written."""
    return OutputError(
        f"{out} cannot be written: {error.strerror}",
        "Choose another folder, or see to its permissions and its disk.",
    )
