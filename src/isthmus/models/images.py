"""Calibration images from folders and from idx files, the format of MNIST."""

from __future__ import annotations

import gzip
import heapq
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import CalibrationError
from isthmus.models.examples import lot

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
"""Endings of the image files that a folder is searched for."""

_IDX = (".idx", "-ubyte", ".idx.gz", "-ubyte.gz")
_UNSIGNED_BYTE = 8
_DIMENSIONS = {"images": (3, 4), "labels": (1,)}

Image = NDArray[np.float32]


def read_images(path: Path) -> Iterator[Image]:
    """Images as float32 arrays of shape [height, width, channels], values 0 to 1.

    Args:
        path: An idx file such as `train-images-idx3-ubyte.gz`, or a folder whose image files, at any
            depth, are taken in the order of their paths.

    Raises:
        CalibrationError: if nothing is there, a file is damaged, or Pillow is missing.
    """
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise CalibrationError(f"there is no file {path}", "Name an idx file or an image folder.")
    if not path.name.endswith(_IDX):
        raise CalibrationError(
            f"{path}: images are read from folders and from idx files",
            f"An idx file's name ends in {', '.join(_IDX)}.",
        )
    pixels = read_idx(path, "images")
    images = pixels.astype(np.float32) / np.float32(255)
    return iter(images[..., None] if pixels.ndim == 3 else images)


def sample_images(images: Iterable[Image], count: int, seed: int) -> list[Image]:
    """Choose images at random, as `sample_examples` chooses texts."""
    return heapq.nsmallest(count, images, key=lambda image: lot(image.tobytes(), seed))


def _folder(path: Path) -> Iterator[Image]:
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in IMAGES)
    if not files:
        raise CalibrationError(
            f"{path} holds no images", f"Images that are read end in {', '.join(IMAGES)}."
        )
    try:
        import PIL.Image
    except ImportError as error:
        raise CalibrationError(
            f"{path}: image files are read by Pillow, which is not installed",
            "pip install 'isthmus[calibration]', or give an idx file.",
        ) from error
    for file in files:
        try:
            with PIL.Image.open(file) as image:
                kept = image if image.mode in ("L", "RGB") else image.convert("RGB")
                pixels = np.asarray(kept, np.float32) / np.float32(255)
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow raises on damaged files
            raise CalibrationError(
                f"{file} is no readable image: {error}", "Take it out, or replace it."
            ) from error
        yield pixels[..., None] if pixels.ndim == 2 else pixels


def read_idx(path: Path, kind: Literal["images", "labels"]) -> NDArray[np.uint8]:
    """The array of an idx file of bytes, gzipped or not: three or four dimensions for images, one for labels.

    Raises:
        CalibrationError: if it is damaged, empty or of another kind.
    """
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise CalibrationError(f"{path} cannot be read: {error}", "Download it again.") from error
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _UNSIGNED_BYTE:
        raise CalibrationError(
            f"{path} is no idx file of bytes", "It begins with the bytes 0, 0, 8."
        )
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if dimensions not in _DIMENSIONS[kind] or len(content) < start:
        raise CalibrationError(
            f"{path} has {dimensions} dimensions, not those of {kind}",
            f"{'Labels are not needed: g' if kind == 'images' else 'G'}ive the file of the {kind}.",
        )
    shape: list[Any] = np.frombuffer(content[4:start], ">u4").tolist()
    expected = start + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise CalibrationError(
            f"{path} is {len(content)} bytes long where its header says {expected}",
            "Download it again.",
        )
    if not shape[0]:
        raise CalibrationError(f"{path} holds no {kind}")
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)
