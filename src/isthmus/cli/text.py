"""Plain text that reads well on a narrow terminal and in a pipe."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Sequence

GAP = "  "
NARROWEST = 20
"""Columns that a folded cell keeps at least."""

_PART = re.compile(r"[^ ._/]*[ ._/]|[^ ._/]+")
"""A word or a part of a name, with what ends it."""


def count(number: int, noun: str) -> str:
    """`1 model`, `2 models`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Without control characters: names come from files, and files from anywhere."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def room() -> int | None:
    """Columns of the terminal, or None when stdout is none and lines may be of any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(
    rows: Iterable[Sequence[str]], *, left: Iterable[int], width: int | None, sections: int = 1
) -> list[str]:
    """Align cells in columns; what does not fit is folded, never cut.

    Args:
        rows: Cells, the headers first.
        left: Columns of words, aligned left; the others hold numbers. Of these the widest is
            folded when the table is too wide.
        width: Columns of the terminal, or None for as many as it takes.
        sections: A rule follows so many first rows.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    words = set(left)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    while width is not None and sum(widths) + len(GAP) * (len(widths) - 1) > width:
        widest = max(words, key=lambda column: widths[column])
        if widths[widest] <= NARROWEST:
            break
        widths[widest] -= 1
    lines = []
    for number, row in enumerate(cells):
        if number == sections:
            lines.append("-" * (sum(widths) + len(GAP) * (len(widths) - 1)))
        folded = [_fold(cell, size) for cell, size in zip(row, widths, strict=True)]
        for line in range(max(map(len, folded))):
            parts = (part[line] if line < len(part) else "" for part in folded)
            placed = (
                part.ljust(size) if column in words else part.rjust(size)
                for column, (part, size) in enumerate(zip(parts, widths, strict=True))
            )
            lines.append(GAP.join(placed).rstrip())
    return lines


def _fold(cell: str, size: int) -> list[str]:
    """Between words or the parts of a name; in the middle of one only where it is too long."""
    lines = [""]
    for part in _PART.findall(cell):
        if len(lines[-1]) + len(part.rstrip()) > size and lines[-1]:
            lines.append("")
        lines[-1] += part
        while len(lines[-1].rstrip()) > size:
            lines[-1:] = [lines[-1][:size], lines[-1][size:]]
    return [line.rstrip() for line in lines]
