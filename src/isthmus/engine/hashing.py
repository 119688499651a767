"""The hash of what is written: XXH3 in 128 bits.

It finds damage as surely as a cryptographic hash and takes a fortieth of the time, which would
otherwise be a third of a linear merge. It does not guard against forgery; neither would any hash in
a manifest that lies beside the weights.
"""

from __future__ import annotations

from pathlib import Path

import xxhash

new_hash = xxhash.xxh3_128
"""Begins a hash; `update` and `hexdigest` as in hashlib."""

READ_BACK = 1 << 22
"""Bytes read at once."""


def hash_range(path: Path, start: int, size: int) -> str:
    """The hash of some bytes of a file; of fewer when the file is shorter."""
    digest = new_hash()
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
