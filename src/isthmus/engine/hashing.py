"""Hashing parts of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

READ_BACK = 1 << 22
"""Bytes read at once."""


def hash_range(path: Path, start: int, size: int) -> str:
    """The sha256 of some bytes of a file; of fewer when the file is shorter."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(size, READ_BACK)))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = size
        while left:
            count = file.readinto(buffer[:left])
            if not count:
                break
            digest.update(buffer[:count])
            left -= count
    return digest.hexdigest()
