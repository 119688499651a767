"""Calibration data as files that a recipe names: training examples, read as the encoder was trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.checkpoints import open_checkpoint
from isthmus.lab.cache import content_key, is_made, make_folder
from isthmus.lab.data.pictures import SIDE
from isthmus.lab.encoders import Encoder
from isthmus.lab.images import ImageEncoder
from isthmus.lab.text import Task
from isthmus.models.data import calibration_batches
from isthmus.models.store import StoredMoments, store_moments

_TEXTS = "texts.jsonl"
_PICTURES = "pictures-idx3-ubyte"


@dataclass(frozen=True)
class Calibration:
    """What an expert is calibrated on.

    Attributes:
        data: The examples.
        count: How many there are.
        tokens: Texts are cut after so many; without meaning for pictures.
        moments: What `isthmus calibrate` found on them.
    """

    data: Path
    count: int
    tokens: int
    moments: Path

    def entry(self, *, stored: bool) -> dict[str, Any]:
        """What a recipe says about it.

        Args:
            stored: Whether the merge can do with moments.
        """
        if stored:
            return {"data": str(self.moments)}
        return {"data": str(self.data), "examples": self.count, "tokens": self.tokens, "seed": 0}


def calibrate(
    task: Task, expert: Path, encoder: Encoder, count: int, folder: Path
) -> tuple[Calibration, StoredMoments]:
    """Write the first training examples of a task, and run its expert on them, unless that is done.

    Args:
        task: The parts of a task are in random order.
        expert: Its expert.
        encoder: The base, which says whether examples are texts or pictures.
        count: How many examples.
        folder: Where to keep both.
    """
    texts = task.train.texts[:count]
    made = folder / "examples"
    images = isinstance(encoder, ImageEncoder)
    data = _write_pictures(texts, encoder, made) if images else write_texts(texts, made)
    with open_checkpoint(str(expert)) as checkpoint:
        batches = calibration_batches(checkpoint, data, examples=count, tokens=task.max_length)
        stored, _ = store_moments(checkpoint, batches, folder / "moments")
    return Calibration(data, count, task.max_length, folder / "moments"), stored


def write_texts(texts: Sequence[str], folder: Path) -> Path:
    """A file of texts in a folder that is made for it, unless that was done."""

    def fill(partial: Path) -> None:
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        (partial / _TEXTS).write_text("".join(lines), encoding="utf-8")

    _make(folder, texts, fill)
    return folder / _TEXTS


def _write_pictures(names: Sequence[str], encoder: Encoder, folder: Path) -> Path:
    """An idx file of pictures, likewise."""

    def fill(partial: Path) -> None:
        pixels = np.array(encoder.tokenize(names, 0), dtype=np.uint8).reshape(-1, SIDE, SIDE)
        header = b"\0\0\x08\x03" + np.array(pixels.shape, dtype=">u4").tobytes()
        (partial / _PICTURES).write_bytes(header + pixels.tobytes())

    _make(folder, names, fill)
    return folder / _PICTURES


def _make(folder: Path, examples: Sequence[str], fill: Callable[[Path], None]) -> None:
    record = {"format": 1, "examples": content_key({"texts": examples})}
    if not is_made(folder, record):
        make_folder(folder, record, fill)
