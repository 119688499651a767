"""The journal: which tensors are written, one line each, so that a merge can go on after a kill.

A line is written after the tensor's last byte. Nothing is flushed to the disk before it, because
whoever resumes reads every journalled tensor again and compares its hash: what did not reach the
disk is simply merged once more.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.closing import Closing
from isthmus.errors import OutputError


@dataclass(frozen=True, slots=True)
class Entry:
    """Tensors that were made together; see `Journal.record`."""

    digests: Mapping[str, str]
    note: str | None
    remarks: Mapping[str, Any] | None


class Journal(Closing):
    """An append-only list of tensors and the hash of their bytes; safe from several threads.

    Args:
        path: The file; made when missing.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self.recorded = _read(path)
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{path} cannot be written: {error.strerror}") from error
        # A kill may have left half a line; the next entry must not be glued to it.
        if self._file.tell():
            self._write("\n")

    def record(
        self, digests: Mapping[str, str], note: str | None, remarks: Mapping[str, Any] | None
    ) -> None:
        """Append tensors that were made together, whose bytes are all written.

        Args:
            digests: The hash of each.
            note: For the user, or None.
            remarks: What else is to be remembered, as JSON can hold it.
        """
        line = json.dumps({"tensors": dict(digests), "note": note, "remarks": remarks})
        with self._lock:
            self._write(line + "\n")

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise OutputError(
                f"{self._file.name} cannot be written: {error.strerror}",
                "Free some space on its disk, then go on with --resume.",
            ) from error

    def close(self) -> None:
        """Release the file. Closing twice is allowed."""
        # What a full disk kept from being flushed is not worth a second error.
        with suppress(OSError):
            self._file.close()


def _read(path: Path) -> list[Entry]:
    """The entries. Lines that a kill cut short are skipped."""
    if not path.exists():
        return []
    entries = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry = json.loads(line)
            entries.append(Entry(entry["tensors"], entry["note"], entry["remarks"]))
        except (ValueError, KeyError, TypeError):
            continue
    return entries
