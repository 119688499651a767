"""One-line descriptions of Debian packages, by the section of the archive that they are in."""

from __future__ import annotations

from pathlib import Path

from isthmus.lab.fetched import fetched_file
from isthmus.lab.text import Corpus

CLASSES = (
    "admin",
    "fonts",
    "games",
    "gnome",
    "graphics",
    "math",
    "net",
    "science",
    "sound",
    "text",
    "web",
    "x11",
)
"""Sections of what people use; those of libraries are told apart by the name of a language."""


def load_sections(folder: Path) -> Corpus:
    """Read the descriptions of Debian's package index.

    Args:
        folder: Where `make data` put its data.

    Raises:
        IsthmusError: The data is not there.
    """
    path = fetched_file(folder, "debian-sections.tsv")
    texts: list[str] = []
    labels: list[int] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        section, _, description = line.partition("\t")
        if section in CLASSES and description:
            texts.append(description)
            labels.append(CLASSES.index(section))
    return Corpus(name="sections", classes=CLASSES, texts=tuple(texts), labels=tuple(labels))
