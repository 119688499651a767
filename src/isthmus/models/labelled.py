"""Examples with their classes: rows with a column for them, folders of images, idx files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from isthmus.errors import CalibrationError
from isthmus.models.examples import Example, example_of
from isthmus.models.images import Image, read_idx, read_images

_COLUMNS = ("label", "labels")

_UNNAMED = re.compile(r"LABEL_\d+")
"""What transformers calls a class that nobody named."""


class Classes:
    """The classes of a model, by the names and numbers that data has for them.

    Args:
        numbers: `label2id` of the model's configuration.
    """

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self._numbers = dict(numbers)

    def number(self, value: Any, place: str) -> int:
        """The class that a label says: a number from 0, perhaps as text, or one of the model's names.

        Raises:
            CalibrationError: the model has no such class.
        """
        if isinstance(value, str) and value in self._numbers:
            return self._numbers[value]
        text = str(value).strip()
        if isinstance(value, (int, str)) and text.isdecimal() and int(text) < len(self._numbers):
            return int(text)
        known = ", ".join(list(self._numbers)[:10])
        raise CalibrationError(
            f"{place} has the label {value!r}; the model has {len(self._numbers)} classes: {known}",
            "Number classes from 0, or name them as `label2id` of the model's config.json does.",
        )

    def of_folders(self, names: Iterable[str], place: str) -> dict[str, int]:
        """The class of every folder of images; by their order where neither side names any.

        Raises:
            CalibrationError: the model has no such classes.
        """
        ordered = sorted(names)
        unnamed = all(_UNNAMED.fullmatch(name) for name in self._numbers)
        told = any(name in self._numbers or name.isdecimal() for name in ordered)
        if unnamed and not told and len(ordered) == len(self._numbers):
            return {name: number for number, name in enumerate(ordered)}
        return {name: self.number(name, f"{place}: folder {name}") for name in ordered}


def labelled_texts(
    rows: Iterable[tuple[str, Any]], column: str | None, label: str | None, classes: Classes
) -> Iterator[tuple[Example, int]]:
    """Texts and their classes.

    Args:
        rows: As `read_rows` gives them.
        column: That of the texts; see `read_examples`.
        label: That of the classes; `label` if None, or else `labels`.
        classes: The model's.

    Raises:
        CalibrationError: a row without a label, or one that the model does not have; as `example_of`.
    """
    for place, row in rows:
        example = example_of(row, column, place)
        if not example:
            continue
        given = row if isinstance(row, Mapping) else {}
        name = label or next((name for name in _COLUMNS if name in given), _COLUMNS[0])
        if given.get(name) is None:
            raise CalibrationError(
                f"{place} has no label in the column {name!r}; it has {', '.join(map(repr, given)) or 'none'}",
                "A classifier needs the class of every text: name its column with --label-column.",
            )
        yield example, classes.number(given[name], place)


def labelled_images(path: Path, classes: Classes) -> Iterator[tuple[Image, int]]:
    """Images and their classes.

    Args:
        path: A folder with a folder of images for every class, or an idx file of images, with that of the
            labels beside it: `train-images-idx3-ubyte` and `train-labels-idx1-ubyte`.
        classes: The model's.

    Raises:
        CalibrationError: there are no labels, they are not as many as images, or the model has no such
            class; as `read_images`.
    """
    if path.is_dir():
        folders = {each.name: each for each in sorted(path.iterdir()) if each.is_dir()}
        if not folders:
            raise CalibrationError(
                f"{path} has no folders, which would name the classes of images",
                "Put the images of every class into a folder of their own.",
            )
        for name, number in classes.of_folders(folders, str(path)).items():
            for image in read_images(folders[name]):
                yield image, number
        return
    images = read_images(path)  # tells first what is wrong with the file itself
    beside = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
    if beside == path or not beside.is_file():
        raise CalibrationError(
            f"{path} has no labels beside it",
            "A classifier needs them: x-images-idx3-ubyte goes with x-labels-idx1-ubyte.",
        )
    numbers = read_idx(beside, "labels").tolist()
    pixels = list(images)
    if len(pixels) != len(numbers):
        raise CalibrationError(
            f"{path} holds {len(pixels)} images and {beside.name} {len(numbers)} labels",
            "Take the two files of one part.",
        )
    for index, (image, number) in enumerate(zip(pixels, numbers, strict=True)):
        yield image, classes.number(number, f"{beside}, item {index}")
