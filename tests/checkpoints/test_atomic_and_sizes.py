"""Small files replaced in one step; sizes as people write them."""

import os
from pathlib import Path

import pytest

from isthmus.checkpoints import atomic_write_bytes, atomic_write_text, parse_size
from isthmus.errors import IsthmusError, OutputError


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    atomic_write_text(path, "schön")
    atomic_write_text(path, "schöner")
    assert path.read_bytes() == "schöner".encode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match=r"a\.txt cannot be written: No space left"):
        atomic_write_bytes(path, b"new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="No such file"):
        atomic_write_text(tmp_path / "missing" / "a.txt", "")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5_000_000_000),
        ("5 gb", 5_000_000_000),
        ("1.5MB", 1_500_000),
        ("512MiB", 512 * 2**20),
        ("2KiB", 2048),
        ("1TiB", 2**40),
        ("3TB", 3 * 10**12),
        ("1000", 1000),
        (1000, 1000),
        ("10B", 10),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "GB", "5 apples", "-5GB", "0", 0, -1, "0.1B", "5GG", "1e9", "٣GB", True, "9" * 99],
)
def test_what_is_no_size(text: str | int) -> None:
    with pytest.raises(IsthmusError, match="is not a size"):
        parse_size(text)
