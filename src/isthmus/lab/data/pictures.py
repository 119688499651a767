"""MNIST and Fashion-MNIST: 28 x 28 grey pixels, ten classes each, 60,000 + 10,000 pictures.

A picture goes by a name, such as ``mnist test 17``; `Pictures` looks up its pixels. So a labelled
picture is an example as a labelled text is, and parts are drawn and recorded in the same way.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import IsthmusError
from isthmus.lab.fetched import fetched_file
from isthmus.lab.text import Corpus

SIDE = 28

FASHION = (
    "t-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
_FILES = {"train": "train", "test": "t10k"}
_FOLDERS = {"mnist": "mnist", "fashion": "fashion-mnist"}

Source = Literal["mnist", "fashion"]
Half = Literal["low", "high"]


@dataclass(frozen=True)
class Pictures:
    """Pixels by name; files are read once.

    Attributes:
        folder: Where `make data` put its data.
    """

    folder: Path
    _read: dict[str, NDArray[np.uint8]] = field(default_factory=dict, compare=False)

    def pixels(self, name: str) -> list[int]:
        """The 784 pixels of a picture, 0 to 255, row after row.

        Args:
            name: Such as ``mnist test 17``, or ``mnist test 17 turned 1`` for a quarter turn.
        """
        source, part, index, *turned = name.split()
        picture = self.array(source, part, "images")[int(index)]
        if turned:
            picture = np.rot90(picture, int(turned[1]))
        values: list[int] = picture.reshape(-1).tolist()
        return values

    def array(self, source: str, part: str, kind: str) -> NDArray[np.uint8]:
        """All pictures ``[N, 28, 28]`` or all labels ``[N]`` of a file.

        Raises:
            IsthmusError: The file is not there, or is no IDX file.
        """
        stem = f"{_FILES[part]}-{kind}-idx{3 if kind == 'images' else 1}-ubyte"
        key = f"{source}/{stem}"
        if key not in self._read:
            suffix = ".gz" if source == "fashion" else ""
            path = fetched_file(self.folder, _FOLDERS[source], stem + suffix)
            data = path.read_bytes()
            self._read[key] = _parsed(gzip.decompress(data) if suffix else data, path)
        return self._read[key]


def load_half(pictures: Pictures, source: Source, half: Half) -> Corpus:
    """Five of ten classes as a task, from the 10,000 test pictures.

    The encoder is trained on the others, so no task shares a picture with it.

    Args:
        pictures: Where pictures are looked up.
        source: Digits or clothes.
        half: Classes 0 to 4, or 5 to 9.

    Raises:
        IsthmusError: The data is not there.
    """
    first = 0 if half == "low" else 5
    names = FASHION if source == "fashion" else tuple(map(str, range(10)))
    labels = pictures.array(source, "test", "labels")
    chosen = np.flatnonzero((labels >= first) & (labels < first + 5)).tolist()
    return Corpus(
        name=f"{source}_{half}",
        classes=names[first : first + 5],
        texts=tuple(f"{source} test {index}" for index in chosen),
        labels=tuple(int(labels[index]) - first for index in chosen),
    )


def _parsed(data: bytes, path: Path) -> NDArray[np.uint8]:
    """The array of an IDX file: two zeros, type 8, number of dimensions, sizes, bytes."""
    dimensions = data[3] if data[:3] == b"\x00\x00\x08" else 0
    header = 4 + 4 * dimensions
    shape = np.frombuffer(data[4:header], dtype=">u4").astype(int)
    if not dimensions or len(data) - header != shape.prod():
        raise IsthmusError(
            f"{path} is no IDX file of bytes.", "Remove its folder and run `make data` again."
        )
    return np.frombuffer(data, dtype=np.uint8, offset=header).reshape(shape)
