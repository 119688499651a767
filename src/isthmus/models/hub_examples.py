"""Calibration texts from a dataset on the Hub, by its name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from isthmus.errors import CalibrationError
from isthmus.models.examples import Example, example_of

MOST = 10_000
"""Rows that are looked at; the choice is made among these, and no more is fetched."""

_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(:(?P<split>[\w.+-]+))?")


def is_dataset_name(text: str) -> bool:
    """Whether a text can name a dataset: `org/name`, `org/name:config` or `org/name:config:split`."""
    return not text.startswith(".") and _NAME.fullmatch(text) is not None


def read_hub_examples(text: str, column: str | None = None) -> Iterator[Example]:
    """The first rows of a dataset on the Hub, streamed; see `examples.read_examples`.

    Args:
        text: As `is_dataset_name` takes it; the split is `train` unless given.
        column: The column that holds texts or conversations; `text` if None, or else `messages`.

    Raises:
        CalibrationError: if `datasets` is not installed, the dataset cannot be had, or the column is missing
            or holds something else.
    """
    for place, row in read_hub_rows(text):
        example = example_of(row, column, place)
        if example:
            yield example


def read_hub_rows(text: str) -> Iterator[tuple[str, Any]]:
    """The first rows of a dataset on the Hub as they are, each after its place, for errors.

    Raises:
        CalibrationError: if `datasets` is not installed, or the dataset cannot be had.
    """
    try:
        import datasets
    except ImportError as error:
        raise CalibrationError(
            f"{text} is no file here, and datasets of the Hub need the package datasets",
            "Name a file, or: pip install datasets.",
        ) from error
    found = _NAME.fullmatch(text)
    assert found is not None
    split = found["split"] or "train"
    try:
        # Code that a dataset brings is not run: the library refuses it unless told otherwise.
        rows = datasets.load_dataset(found["name"], found["config"], split=split, streaming=True)
        for number, row in enumerate(islice(rows, MOST)):
            yield f"{text}, row {number}", row
    except Exception as error:  # its errors, and those of the network beneath it, are of many kinds
        reason = " ".join(str(error).split())[:300]
        raise CalibrationError(
            f"{text} is no file here, and the Hub does not give a dataset of that name: {reason}",
            "Name a file that exists, or a dataset as org/name, org/name:config or org/name:config:split.",
        ) from error
