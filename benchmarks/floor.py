"""The least that any merge must do: read every input once, write the output once.

python benchmarks/floor.py OUT SIZE INPUT...
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

BUFFER = 1 << 20
"""Bytes; stays in a core's cache, and is large enough that system calls cost nothing."""


def main(out: str, size: int, inputs: list[str]) -> None:
    buffer = np.zeros(BUFFER, np.uint8)
    for path in inputs:
        with Path(path).open("rb", buffering=0) as file:
            while file.readinto(buffer.data):
                pass
    with Path(out).open("wb", buffering=0) as file:
        for start in range(0, size, BUFFER):
            file.write(buffer[: size - start].data)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
