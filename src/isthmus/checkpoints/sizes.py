"""Sizes of files as people write them."""

from __future__ import annotations

import re

from isthmus.errors import RecipeError

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


def parse_size(text: str | int) -> int:
    """The number of bytes in a size such as `5GB` (10^9 each), `512MiB` (2^20 each) or `1000`.

    Raises:
        RecipeError: if it is not a positive size.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([a-z]*)\s*", str(text).lower(), re.ASCII)
    if match and match[2] in _UNITS:
        size = int(float(match[1]) * _UNITS[match[2]])
        if size > 0:
            return size
    raise RecipeError(f"{text!r} is not a size", "Write 5GB, 512MiB, or a number of bytes.")
