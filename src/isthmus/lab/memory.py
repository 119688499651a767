"""What was judged once is remembered, so that a run that was stopped can go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from isthmus.lab.evaluate import Accuracies


class Memory:
    """Accuracies by the hash of everything that they depend on, a line of JSON each.

    Args:
        path: The file; made when the first line is written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Accuracies] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                    self._known[entry["key"]] = entry["accuracy"]
                except (ValueError, TypeError, KeyError):
                    continue  # A run was killed while it wrote this line.

    def get(self, key: str) -> Accuracies | None:
        """What was remembered under a key, if anything."""
        return self._known.get(key)

    def put(self, key: str, accuracy: Accuracies) -> None:
        """Remember, here and on disk."""
        self._known[key] = accuracy
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            # What a killed run left behind ends without a line feed.
            if file.tell() and _last_byte(file) != b"\n":
                file.write(b"\n")
            file.write(json.dumps({"key": key, "accuracy": accuracy}).encode() + b"\n")


def _last_byte(file: Any) -> bytes:
    file.seek(-1, 2)
    last: bytes = file.read(1)
    return last
