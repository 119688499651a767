"""Opening plain files, and as many of them at once as a model has shards."""

from __future__ import annotations

import errno
import os
import resource
import stat
from functools import cache
from pathlib import Path

from isthmus.errors import CheckpointError

# Several models of some hundred shards each, and a margin; a limit beyond it slows other programs
# that a process starts, as some close every descriptor that they might have.
_FILES = 65_536

TOO_MANY = {errno.EMFILE, errno.ENFILE}
"""What the system answers when no further file can be open."""

TOO_MANY_CURE = (
    f"Raise the limit with `ulimit -n {_FILES}` in the same shell, or merge models of fewer shards."
)


@cache
def allow_many_files() -> None:
    """Let this process hold more files open than the usual 1024, as far as its hard limit goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # a system with a further limit; the usual one remains
            return


def open_regular(path: Path) -> tuple[int, os.stat_result]:
    """Open a plain file for reading.

    Returns:
        Its descriptor, and its status.

    Raises:
        CheckpointError: if it does not exist, may not be read, or is no plain file.
    """
    allow_many_files()
    try:
        # A pipe would block the opening, so look first.
        if stat.S_ISREG(path.stat().st_mode):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return descriptor, os.fstat(descriptor)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be opened: {error.strerror}",
            TOO_MANY_CURE if error.errno in TOO_MANY else None,
        ) from error
    raise CheckpointError(f"{path} is a folder or a device, not a file")


def read_regular(path: Path) -> bytes:
    """The content of a plain file.

    Raises:
        CheckpointError: if it does not exist, may not be read, or is no plain file.
    """
    descriptor, _ = open_regular(path)
    with os.fdopen(descriptor, "rb") as file:
        try:
            return file.read()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
