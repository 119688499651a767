"""Where adapters are trained: a base encoder and the tasks that go with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from isthmus.lab.cache import is_made, make_folder
from isthmus.lab.data.movies import load_movies
from isthmus.lab.data.news import load_news
from isthmus.lab.data.pictures import Pictures, load_half
from isthmus.lab.data.sections import load_sections
from isthmus.lab.data.spam import load_spam
from isthmus.lab.data.tweets import load_tweets
from isthmus.lab.encoders import Encoder
from isthmus.lab.packaged import minilm
from isthmus.lab.progress import Narrator
from isthmus.lab.text import Corpus


class Family(Protocol):
    """A base encoder and its tasks."""

    def corpora(self, names: Iterable[str]) -> dict[str, Corpus]:
        """Read the corpora of some tasks.

        Raises:
            IsthmusError: A data package is not installed, or `make data` was not run.
        """

    def base(self, cache: Path, narrator: Narrator) -> tuple[Path, Encoder]:
        """The folder of the base encoder, and the encoder.

        Args:
            cache: Where a base that is trained here is kept.
            narrator: Told of stages.
        """


class TextFamily:
    """all-MiniLM-L6-v2 and six text tasks.

    Args:
        data: Where `make data` put what no Python package ships.
    """

    def __init__(self, data: Path) -> None:
        self._loaders: dict[str, Callable[[], Corpus]] = {
            "imdb": partial(load_movies, "imdb"),
            "rotten_tomatoes": partial(load_movies, "rotten_tomatoes"),
            "news": load_news,
            "tweets": load_tweets,
            "spam": partial(load_spam, data),
            "sections": partial(load_sections, data),
        }

    def corpora(self, names: Iterable[str]) -> dict[str, Corpus]:
        """Read the corpora of some tasks."""
        return {name: replace(self._loaders[name](), name=name) for name in names}

    def base(self, cache: Path, narrator: Narrator) -> tuple[Path, Encoder]:  # noqa: ARG002
        """MiniLM, out of its package."""
        folder = minilm()
        return folder, Encoder.load(folder)


class VisionFamily:
    """A small vision transformer, trained here, and the halves of MNIST and Fashion-MNIST.

    Args:
        data: Where `make data` put the pictures.
    """

    def __init__(self, data: Path) -> None:
        self._pictures = Pictures(data)

    def corpora(self, names: Iterable[str]) -> dict[str, Corpus]:
        """Read the labels of some tasks."""
        halves: dict[str, Callable[[], Corpus]] = {
            "mnist_low": partial(load_half, self._pictures, "mnist", "low"),
            "mnist_high": partial(load_half, self._pictures, "mnist", "high"),
            "fashion_low": partial(load_half, self._pictures, "fashion", "low"),
            "fashion_high": partial(load_half, self._pictures, "fashion", "high"),
        }
        return {name: halves[name]() for name in names}

    def base(self, cache: Path, narrator: Narrator) -> tuple[Path, Encoder]:
        """The transformer, trained now or before."""
        from isthmus.lab.images import PICTURES, PRETRAINING, load_image_encoder, pretrain

        folder = cache / "base"
        record = {"format": 2, "pictures": PICTURES, "training": asdict(PRETRAINING)}
        if not is_made(folder, record):

            def fill(partial_folder: Path) -> None:
                total = 2 * PICTURES * PRETRAINING.epochs
                with narrator.stage("Base encoder", total) as advance:
                    encoder = pretrain(self._pictures, PICTURES, PRETRAINING, advance)
                encoder.save(partial_folder)

            make_folder(folder, record, fill)
        return folder, load_image_encoder(folder, self._pictures)


FAMILIES: dict[str, Callable[[Path], Family]] = {"text": TextFamily, "vision": VisionFamily}
"""By name; each is made from the folder of the data."""
