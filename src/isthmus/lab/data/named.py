"""Data to train on, by name: what the lab ships or fetches, or anything that `datasets` loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.errors import IsthmusError
from isthmus.lab.data.corpora import GENRES, load_genre
from isthmus.lab.data.pictures import Pictures
from isthmus.recipes.problems import nearest

_PICTURES = {"mnist": "mnist", "fashion-mnist": "fashion"}
_DIGITS_TEST = 360
_CHARACTERS = 1_000_000
_HELD_OUT = 200_000


@dataclass(frozen=True)
class Data:
    """Examples to train on and examples to judge by.

    Attributes:
        inputs: Pictures [n, channels, height, width], float32 from 0 to 1; or bytes of text [n, context], int64.
        targets: Classes [n], or the byte that follows each [n, context]; int64.
        test_inputs: As `inputs`.
        test_targets: As `targets`.
        classes: How many there are.
    """

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    classes: int


def training_data(name: str, cache: Path, *, context: int = 64) -> Data:
    """Load data by name.

    Args:
        name: ``digits`` (of scikit-learn), ``mnist``, ``fashion-mnist``; a genre of text, ``kernel``,
            ``dictionary``, ``essays`` or ``e-mail``; or, with a slash in it, what `datasets.load_dataset` takes: a
            folder on this machine (``./pictures``) or a name on the Hub (``ylecun/mnist``), with
            pictures and classes, or texts.
        cache: Where `make data` put its data.
        context: Bytes of an example of text.

    Raises:
        IsthmusError: There is no such data, it was not fetched, or it has no pictures with classes and no texts.
    """
    if name == "digits":
        return _digits()
    if name in _PICTURES:
        pictures = Pictures(cache / "data")
        parts = [_part(pictures, _PICTURES[name], part) for part in ("train", "test")]
        return Data(*parts[0], *parts[1], classes=10)
    if name in GENRES:
        genre = load_genre(cache / "data", name, _CHARACTERS, _HELD_OUT)
        return _text(genre.training, genre.held_out, context, name)
    if "/" in name or Path(name).is_dir():
        return _from_datasets(name, context)
    known = ["digits", *_PICTURES, *GENRES]
    near = nearest(name, known)
    hint = f"Did you mean {near!r}? " if near else ""
    raise IsthmusError(
        f"there is no data set {name!r}",
        f"{hint}There are {', '.join(known)}; a folder or a name on the Hub has a slash in it.",
    )


def _digits() -> Data:
    from sklearn.datasets import load_digits

    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    pictures = torch.from_numpy((found.images[order] / 16).astype(np.float32)).unsqueeze(1)
    classes = torch.from_numpy(found.target[order].astype(np.int64))
    split = len(order) - _DIGITS_TEST
    return Data(pictures[:split], classes[:split], pictures[split:], classes[split:], classes=10)


def _part(pictures: Pictures, source: str, part: str) -> tuple[Tensor, Tensor]:
    images = torch.tensor(pictures.array(source, part, "images")).float().unsqueeze(1) / 255
    labels = torch.tensor(pictures.array(source, part, "labels").astype(np.int64))
    return images, labels


def _text(training: str, held_out: str, context: int, name: str) -> Data:
    return Data(*_windows(training, context, name), *_windows(held_out, context, name), classes=256)


def _windows(text: str, context: int, name: str) -> tuple[Tensor, Tensor]:
    """Bytes in rows that do not overlap, and the same one byte later; both [n, context]."""
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    count = (len(content) - 1) // context
    if count < 1:
        raise IsthmusError(
            f"the texts of {name} have {len(content)} bytes, too few for one example of {context}",
            "Give more text, or lower `context`.",
        )
    ends = count * context
    return content[:ends].reshape(count, context), content[1 : ends + 1].reshape(count, context)


def _from_datasets(name: str, context: int) -> Data:
    try:
        import datasets
    except ImportError as error:
        raise IsthmusError(
            f"{name} is read by the package datasets, which is not installed",
            "pip install datasets",
        ) from error
    try:
        found = datasets.load_dataset(name)
    except Exception as error:
        raise IsthmusError(
            f"datasets cannot load {name!r}: {error}",
            "Name a folder that it can read, or a data set on the Hub that this machine can reach.",
        ) from error
    splits = {key: found[key] for key in found}
    if "train" not in splits:
        raise IsthmusError(
            f"{name} has the parts {', '.join(splits)}, and no train", "Give it a part `train`."
        )
    test = next((splits[key] for key in ("test", "validation") if key in splits), None)
    if test is None:
        # The same every time, and none of it trained on.
        cut = splits["train"].train_test_split(test_size=0.1, seed=0)
        splits["train"], test = cut["train"], cut["test"]
    return _columns(name, splits["train"], test, context)


def _columns(name: str, training: Any, test: Any, context: int) -> Data:
    import datasets

    def first(wanted: Callable[[Any], bool]) -> str | None:
        return next((key for key, kind in training.features.items() if wanted(kind)), None)

    picture = first(lambda kind: isinstance(kind, datasets.Image))
    label = first(lambda kind: isinstance(kind, datasets.ClassLabel))
    if picture is not None and label is not None:
        classes = training.features[label].num_classes
        parts = [_pictures(name, part, picture, label) for part in (training, test)]
        if parts[0][0].shape[1:] != parts[1][0].shape[1:]:
            raise IsthmusError(
                f"{name} has pictures of {list(parts[0][0].shape[2:])} to train on and of "
                f"{list(parts[1][0].shape[2:])} to test",
                "Give them one size.",
            )
        return Data(*parts[0], *parts[1], classes=classes)
    text = first(lambda kind: isinstance(kind, datasets.Value) and kind.dtype == "string")
    if text is None:
        raise IsthmusError(
            f"{name} has the columns {', '.join(training.features)}: no pictures with classes, and no text",
            "The lab trains on a column of pictures and one of classes, or on a column of text.",
        )
    joined = ["\n\n".join(each for each in part[text] if each) for part in (training, test)]
    return _text(joined[0], joined[1], context, name)


def _pictures(name: str, part: Any, picture: str, label: str) -> tuple[Tensor, Tensor]:
    """Grey pictures stay grey, all others become RGB."""
    images = []
    for each in part[picture]:
        grey = each.mode in ("1", "L")
        values = np.asarray(each.convert("L" if grey else "RGB"), dtype=np.float32) / 255
        images.append(values[None] if grey else values.transpose(2, 0, 1))
    labels = list(part[label])
    # The Hub writes -1 where the answers are kept secret.
    if not labels or any(each is None or each < 0 for each in labels):
        raise IsthmusError(
            f"{name} has pictures without a class, or a part without pictures",
            "Give it a part `train`, and no part `test` or `validation` that lacks classes.",
        )
    sizes = {image.shape for image in images}
    if len(sizes) != 1:
        raise IsthmusError(
            f"{name} has pictures of {len(sizes)} sizes, such as {sorted(sizes)[:2]}",
            "Give them one size.",
        )
    return torch.from_numpy(np.stack(images)), torch.tensor(labels, dtype=torch.int64)
