"""From the user's files to the batches that a model takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from isthmus.checkpoints import Checkpoint
from isthmus.errors import CalibrationError
from isthmus.models.batches import image_batches, text_batches
from isthmus.models.examples import read_examples, sample_examples
from isthmus.models.hub_examples import is_dataset_name, read_hub_examples
from isthmus.models.images import read_images, sample_images

_PROCESSOR = "preprocessor_config.json"

_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "tokenizer.model")

_REASON = 300
"""Characters of a library's message; some tell all that they know."""


def calibration_batches(
    checkpoint: Checkpoint,
    data: Path,
    *,
    column: str | None = None,
    examples: int = 128,
    tokens: int = 256,
    seed: int = 0,
    lender: Checkpoint | None = None,
) -> list[dict[str, Tensor]]:
    """Batches of randomly chosen examples: of texts, or of images where the model takes images alone.

    Args:
        checkpoint: A model with its tokenizer, if it has one.
        data: As `read_examples` or `read_images` takes it, or the name of a dataset on the Hub.
        column: The column of the texts.
        examples: How many to choose; all of them where there are fewer.
        tokens: Longer texts are cut after so many.
        seed: For the choice.
        lender: Whose tokenizer serves where the model's folder has none, such as its base.

    Raises:
        CalibrationError: if the data, the tokenizer or the model cannot be used, or do not fit.
    """
    config = checkpoint.config
    if config is None or checkpoint.path is None:
        raise CalibrationError(
            f"{checkpoint.label} has no config.json", "Name a folder in the Hub's layout."
        )
    folder = folder_of(checkpoint.path)
    if sees_alone(config):
        images = sample_images(read_images(data), examples, seed)
        processor = processor_in(folder)
        with about(data, checkpoint):
            return image_batches(images, config, processor)
    if not data.exists() and is_dataset_name(str(data)):
        found = read_hub_examples(str(data), column)
    else:
        found = read_examples(data, column)
    chosen = sample_examples(found, examples, seed)
    if lender is not None and lender.path is not None and not _has_tokenizer(folder):
        folder = folder_of(lender.path)
    tokenizer = tokenizer_in(folder)
    with about(data, checkpoint):
        return text_batches(chosen, tokenizer, config, tokens)


@contextmanager
def about(data: Path, checkpoint: Checkpoint) -> Iterator[None]:
    """Errors name the data and the model, of which a merge has several."""
    try:
        yield
    except CalibrationError as error:
        raise CalibrationError(
            f"{data} for {checkpoint.label}: {error.problem}", error.cure
        ) from error


def folder_of(path: Path) -> Path:
    """Where the files beside a model are: tokenizer, image processor."""
    return path if path.is_dir() else path.parent


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZERS)


def sees_alone(config: Mapping[str, Any]) -> bool:
    """Whether a model takes images and no text."""
    # Networks of convolutions take any size, and their configurations name none.
    sees = "image_size" in config or "num_channels" in config
    return sees and "vocab_size" not in config and "text_config" not in config


def tokenizer_in(folder: Path) -> Any:
    """The tokenizer of a model's folder.

    Raises:
        CalibrationError: if there is none that can be loaded.
    """
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # its errors differ between versions and tokenizers
        reason = " ".join(str(error).split())[:_REASON]
        raise CalibrationError(
            f"{folder} has no tokenizer that can be loaded: {reason}",
            "Put the files of the model's tokenizer into the folder.",
        ) from error


def processor_in(folder: Path) -> Any:
    """The image processor of a model's folder; None if it has none.

    Raises:
        CalibrationError: if there is one that cannot be loaded.
    """
    if not (folder / _PROCESSOR).exists():
        return None
    import transformers

    try:
        return transformers.AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # as above
        reason = " ".join(str(error).split())[:_REASON]
        raise CalibrationError(
            f"{folder / _PROCESSOR} cannot be used: {reason}",
            "Install what it asks for, or take it away and give images of the model's size.",
        ) from error
