"""Calibration data as files that a recipe names: training examples, read as the encoder was trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.checkpoints import open_checkpoint
from isthmus.lab.cache import content_key, is_made, make_folder
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
    examples = task.train.texts[:count]
    made = folder / "examples"
    record = {"format": 1, "examples": content_key({"texts": examples})}
    if not is_made(made, record):
        make_folder(made, record, lambda partial: _write(examples, encoder, partial))
    name = _PICTURES if isinstance(encoder, ImageEncoder) else _TEXTS
    with open_checkpoint(str(expert)) as checkpoint:
        batches = calibration_batches(
            checkpoint, made / name, examples=count, tokens=task.max_length
        )
        stored, _ = store_moments(checkpoint, batches, folder / "moments")
    return Calibration(made / name, count, task.max_length, folder / "moments"), stored


def _write(examples: Sequence[str], encoder: Encoder, folder: Path) -> None:
    if isinstance(encoder, ImageEncoder):
        pixels = np.array(encoder.tokenize(examples, 0), dtype=np.uint8).reshape(-1, 28, 28)
        header = b"\0\0\x08\x03" + np.array(pixels.shape, dtype=">u4").tobytes()
        (folder / _PICTURES).write_bytes(header + pixels.tobytes())
        return
    lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in examples)
    (folder / _TEXTS).write_text("".join(lines), encoding="utf-8")
