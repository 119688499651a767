"""From the user's files to micro-batches with labels, of one size and in random order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.checkpoints import Checkpoint
from isthmus.errors import CalibrationError, TrainingError
from isthmus.models.batches import image_batches, padded, text_rows
from isthmus.models.data import about, folder_of, processor_in, tokenizer_in
from isthmus.models.examples import example_of, lot, read_rows, sample_examples
from isthmus.models.functional import NetworkFunction
from isthmus.models.hub_examples import is_dataset_name, read_hub_rows
from isthmus.models.images import Image
from isthmus.models.labelled import Classes, labelled_images, labelled_texts

_IGNORED = -100
"""The label of transformers for positions that have none."""

_FEWEST = 4
"""Micro-batches: two blocks of two."""


@dataclass(frozen=True)
class NoiseData:
    """What to measure noise on.

    Attributes:
        data: A file or folder, or the name of a dataset on the Hub; see `read_rows` and `labelled_images`.
        batch: Examples of a micro-batch.
        examples: How many to choose at random; all of them where there are fewer.
        tokens: Longer texts are cut after so many.
        column: That of the texts; `text` if None, or else `messages`.
        label_column: That of the classes; `label` if None, or else `labels`.
        seed: Of the choice and its order.
        pictures: Images with the numbers of their classes, instead of those in `data`.
    """

    data: Path
    batch: int = 4
    examples: int = 256
    tokens: int = 256
    column: str | None = None
    label_column: str | None = None
    seed: int = 0
    pictures: Iterable[tuple[Image, int]] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class MicroBatches:
    """Batches that are made when they are read.

    Attributes:
        kind: What an example is: text or image.
        examples: How many there are; those that fill no micro-batch are left out.
        batch: Examples of a micro-batch.
    """

    kind: str
    examples: int
    batch: int
    _made: Callable[[slice], dict[str, Tensor]] = field(repr=False)

    def __len__(self) -> int:
        return self.examples // self.batch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(len(self)):
            yield self._made(slice(number * self.batch, (number + 1) * self.batch))


def micro_batches(checkpoint: Checkpoint, network: nn.Module, given: NoiseData) -> MicroBatches:
    """Inputs and `labels` for a transformers model, of the classes where it is a classifier.

    Args:
        checkpoint: A model with its tokenizer, or its image processor if it needs one.
        network: Of this checkpoint; its parameters may be on the meta device.
        given: The data. Texts without any token are left out, and for language models those of one.

    Raises:
        CalibrationError: the data, the tokenizer or the model cannot be used, or do not fit; a classifier
            whose examples have no labels.
        TrainingError: too few examples for four micro-batches, or a model without a loss of one of
            three kinds.
    """
    if given.batch < 1 or given.examples < 1:
        raise TrainingError(
            f"micro-batches of {given.batch} examples out of {given.examples}",
            "Both must be at least 1.",
        )
    config = checkpoint.config
    if config is None or checkpoint.path is None:
        raise CalibrationError(
            f"{checkpoint.label} has no config.json", "Name a folder in the Hub's layout."
        )
    folder = folder_of(checkpoint.path)
    kind = type(network).__name__
    if NetworkFunction(network).next_token:
        rows = _language(checkpoint, given, folder)
        return _counted("text", len(rows), given, lambda part: _predicting(rows[part], config))
    if kind.endswith("ForSequenceClassification"):
        rows, labels = _labelled(checkpoint, network, given, folder)
        return _counted(
            "text",
            len(rows),
            given,
            lambda part: padded(rows[part], config) | {"labels": labels[part]},
        )
    if kind.endswith("ForImageClassification"):
        images, labels = _pictures(checkpoint, network, given)
        processor = processor_in(folder)

        def made(part: slice) -> dict[str, Tensor]:
            with about(given.data, checkpoint):
                parts = image_batches(images[part], config, processor)
            pixels = torch.cat([each["pixel_values"] for each in parts])
            return {"pixel_values": pixels, "labels": labels[part]}

        return _counted("image", len(images), given, made)
    raise TrainingError(
        f"{checkpoint.label} is a {kind}, for which no loss is known here",
        "Noise is measured of causal language models, and of classifiers of sequences or images.",
    )


def _counted(
    kind: str, count: int, given: NoiseData, made: Callable[[slice], dict[str, Tensor]]
) -> MicroBatches:
    if given.batch > count:
        raise TrainingError(
            f"a micro-batch of {given.batch} is larger than the data: {_some(count, kind)} of {given.data}",
            "Lower --batch, or give more examples.",
        )
    if count // given.batch < _FEWEST:
        raise TrainingError(
            f"{_some(count, kind)} of {given.data} in micro-batches of {given.batch} make {count // given.batch} "
            f"of them; noise shows between {_FEWEST} at least",
            "Give more examples (a good interval needs twenty micro-batches), or lower --batch.",
        )
    return MicroBatches(kind, count, given.batch, made)


def _some(count: int, kind: str) -> str:
    return f"{count} {kind}{'' if count == 1 else 's'}"


def _rows(given: NoiseData) -> Iterator[tuple[str, Any]]:
    if not given.data.exists() and is_dataset_name(str(given.data)):
        return read_hub_rows(str(given.data))
    return read_rows(given.data)


def _order(count: int, seed: int) -> list[int]:
    """At random: the lots of equal examples are equal, which would put them side by side."""
    drawn: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return drawn


def _language(checkpoint: Checkpoint, given: NoiseData, folder: Path) -> list[list[int]]:
    found = (
        example for place, row in _rows(given) if (example := example_of(row, given.column, place))
    )
    chosen = sample_examples(found, given.examples, given.seed)
    tokenizer = tokenizer_in(folder)
    with about(given.data, checkpoint):
        rows = text_rows(chosen, tokenizer, checkpoint.config or {}, given.tokens)
    kept = [row for row in rows if len(row) > 1]
    return [kept[index] for index in _order(len(kept), given.seed)]


def _predicting(rows: Sequence[Sequence[int]], config: Any) -> dict[str, Tensor]:
    """Labels for every token but padding; the model shifts them."""
    batch = padded(rows, config)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, _IGNORED)
    return batch | {"labels": labels}


def _labelled(
    checkpoint: Checkpoint, network: nn.Module, given: NoiseData, folder: Path
) -> tuple[list[list[int]], Tensor]:
    classes = _classes(checkpoint, network)
    config: Any = network.config
    if config.pad_token_id is None:
        raise TrainingError(
            f"config.json of {checkpoint.label} has no pad_token_id, which tells a classifier where texts end",
            "Write that of the tokenizer into it.",
        )
    pairs = labelled_texts(_rows(given), given.column, given.label_column, classes)
    chosen = sample_examples(pairs, given.examples, given.seed)
    tokenizer = tokenizer_in(folder)
    with about(given.data, checkpoint):
        rows = text_rows(
            [text for text, _ in chosen], tokenizer, checkpoint.config or {}, given.tokens
        )
    kept = [(row, label) for row, (_, label) in zip(rows, chosen, strict=True) if row]
    ordered = [kept[index] for index in _order(len(kept), given.seed)]
    return [row for row, _ in ordered], torch.tensor([label for _, label in ordered])


def _pictures(
    checkpoint: Checkpoint, network: nn.Module, given: NoiseData
) -> tuple[list[Image], Tensor]:
    classes = _classes(checkpoint, network)
    if given.pictures is None:
        pairs = labelled_images(given.data, classes)
    else:
        pairs = ((image, classes.number(label, str(given.data))) for image, label in given.pictures)
    chosen = heapq.nsmallest(
        given.examples, pairs, key=lambda pair: lot(pair[0].tobytes(), given.seed)
    )
    ordered = [chosen[index] for index in _order(len(chosen), given.seed)]
    return [image for image, _ in ordered], torch.tensor([label for _, label in ordered])


def _classes(checkpoint: Checkpoint, network: nn.Module) -> Classes:
    config: Any = network.config
    if config.num_labels < 2 or config.problem_type not in (None, "single_label_classification"):
        raise TrainingError(
            f"{checkpoint.label} gives numbers or several classes at once, not one class of several",
            "Noise is measured of classifiers with one class for each example.",
        )
    return Classes(config.label2id)
