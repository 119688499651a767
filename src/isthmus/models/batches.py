"""Batches that a network takes, made of texts or images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import CalibrationError
from isthmus.models.examples import Example, example_text
from isthmus.models.images import Image

BATCH_TOKENS = 2048
"""Tokens of a batch, padding included."""

BATCH_IMAGES = 8

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length")


def text_batches(
    examples: Sequence[Example], tokenizer: Any, config: Mapping[str, Any], tokens: int
) -> list[dict[str, Tensor]]:
    """`input_ids` and `attention_mask`, both of shape [B, T], padded on the right.

    Texts of about equal length share a batch, so that there is little padding.

    Args:
        examples: Texts and conversations.
        tokenizer: The model's own.
        config: The model's parsed `config.json`.
        tokens: Longer texts are cut after so many.

    Raises:
        CalibrationError: if no text has any token, a text is longer than the model allows, or the
            tokenizer gives an id that the model has no embedding for.
    """
    rows = [row for row in text_rows(examples, tokenizer, config, tokens) if row]
    rows.sort(key=lambda row: (-len(row), row))
    return [padded(part, config) for part in _parts(rows)]


def text_rows(
    examples: Sequence[Example], tokenizer: Any, config: Mapping[str, Any], tokens: int
) -> list[list[int]]:
    """The tokens of each example, in the same order, none for some perhaps; see `text_batches`.

    Raises:
        CalibrationError: as `text_batches`.
    """
    described = config.get("text_config", config)
    rows = [_ids(example, tokenizer, tokens) for example in examples]
    if not any(rows):
        raise CalibrationError(
            "the calibration examples have no tokens",
            "Give texts that the model's tokenizer knows.",
        )
    longest = _longest(described, tokenizer)
    most = max(map(len, rows))
    if longest is not None and most > longest:
        raise CalibrationError(
            f"a calibration example has {most} tokens; the model takes {longest}",
            f"Cut examples shorter: tokens: {longest} in a recipe, --tokens {longest} for isthmus calibrate.",
        )
    size = described.get("vocab_size")
    largest = max(max(row) for row in rows if row)
    if size is not None and largest >= size:
        raise CalibrationError(
            f"the tokenizer gives the id {largest}; the model has {size} embeddings",
            "Use the tokenizer that belongs to the model.",
        )
    return rows


def padded(rows: Sequence[Sequence[int]], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """One batch of the rows: `input_ids` and `attention_mask`, both of shape [rows, longest row]."""
    pad = config.get("text_config", config).get("pad_token_id") or 0
    ids = torch.full((len(rows), max(map(len, rows))), pad)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def image_batches(
    images: Iterable[Image], config: Mapping[str, Any], processor: Any = None
) -> list[dict[str, Tensor]]:
    """`pixel_values` of shape [B, channels, height, width].

    Args:
        images: Shape [height, width, channels] each, values 0 to 1.
        config: The model's parsed `config.json`.
        processor: The model's image processor; without one, images go in as they are.

    Raises:
        CalibrationError: if an image has not the shape that the model takes.
    """
    described = config.get("vision_config", config)
    size = described.get("image_size")
    expected = (described.get("num_channels", 3), *(size if isinstance(size, list) else [size] * 2))
    batches = []
    remaining = iter(images)
    while part := list(islice(remaining, BATCH_IMAGES)):
        if processor is None:
            rows = [torch.from_numpy(image).permute(2, 0, 1) for image in part]
        else:
            # It takes bytes; what it does with floating point differs between versions.
            pixels = [np.rint(image * 255).astype(np.uint8) for image in part]
            if expected[0] == 3:
                pixels = [
                    np.repeat(one, 3, axis=-1) if one.shape[-1] == 1 else one for one in pixels
                ]
            rows = list(processor(images=pixels, return_tensors="pt")["pixel_values"])
        for row in rows:
            if size is not None and tuple(row.shape) != expected:
                raise CalibrationError(
                    f"a calibration image has shape {list(row.shape)} (channels, height, width); the "
                    f"model takes {list(expected)}",
                    "Resize the images, or put preprocessor_config.json beside the model.",
                )
            if row.shape != rows[0].shape:
                raise CalibrationError(
                    f"calibration images of shapes {list(rows[0].shape)} and {list(row.shape)} (channels, height, "
                    "width) fit into no batch",
                    "Resize the images, or put preprocessor_config.json beside the model.",
                )
        batches.append({"pixel_values": torch.stack(rows).float()})
    return batches


def joined(batches: Sequence[Mapping[str, Tensor]], count: int) -> list[dict[str, Tensor]]:
    """Fewer batches of the same images, of so many at the most; of texts, whose lengths differ, the same batches.

    Args:
        batches: Of one kind each, as `image_batches` and `text_batches` make them.
        count: Images of a batch; the batches are not cut.
    """
    made: list[dict[str, Tensor]] = []
    for batch in batches:
        pixels = batch.get("pixel_values")
        before = made[-1].get("pixel_values") if made else None
        if pixels is None or before is None or len(before) + len(pixels) > count:
            made.append(dict(batch))
        else:
            made[-1]["pixel_values"] = torch.cat([before, pixels])
    return made


def _ids(example: Example, tokenizer: Any, tokens: int) -> list[int]:
    # A chat template writes the special tokens itself.
    plain = isinstance(example, str)
    text = example_text(example, tokenizer)
    encoded = tokenizer(text, truncation=True, max_length=tokens, add_special_tokens=plain)
    ids: list[int] = encoded["input_ids"]
    return ids


def _longest(config: Mapping[str, Any], tokenizer: Any) -> int | None:
    """RoBERTa has two positions more than it takes tokens, which its tokenizer knows."""
    known = [config[key] for key in _LENGTHS if config.get(key)]
    return min([*known, tokenizer.model_max_length]) if known else None


def _parts(rows: list[list[int]]) -> Iterator[list[list[int]]]:
    """Runs of rows, the longest first, that fit in a batch."""
    start = 0
    while start < len(rows):
        count = max(1, BATCH_TOKENS // len(rows[start]))
        yield rows[start : start + count]
        start += count
