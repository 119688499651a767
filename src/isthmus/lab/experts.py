"""Heads and experts of the demo, made once for given settings and reused afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from isthmus.lab.cache import content_key, file_hash, is_made, make_folder
from isthmus.lab.data.movies import load_movies
from isthmus.lab.data.news import load_news
from isthmus.lab.data.tweets import load_tweets
from isthmus.lab.encoders import Encoder, fine_tune
from isthmus.lab.heads import Head, fit_head
from isthmus.lab.progress import Narrator
from isthmus.lab.settings import DemoSettings, Sizes
from isthmus.lab.text import Corpus, Task, split

LOADERS: Mapping[str, Callable[[], Corpus]] = {
    "movies": load_movies,
    "news": load_news,
    "tweets": load_tweets,
}

_FORMAT = 1
"""Raised when the way of training changes, so that experts of old are not taken for new ones."""


def load_tasks(settings: DemoSettings) -> dict[str, Task]:
    """Read the corpora and draw every task's parts.

    Raises:
        IsthmusError: A data package is not installed, or a corpus is too small.
    """
    corpora = {name: LOADERS[name]() for name in settings.sizes}
    return draw_tasks(corpora, settings.sizes, settings.seed)


def draw_tasks(
    corpora: Mapping[str, Corpus], sizes: Mapping[str, Sizes], seed: int
) -> dict[str, Task]:
    """Draw every task's parts by one seed.

    Raises:
        IsthmusError: A corpus is too small.
    """
    return {
        name: split(
            corpora[name],
            train=size.train,
            validation=size.validation,
            test=size.test,
            max_length=size.max_length,
            seed=seed,
        )
        for name, size in sizes.items()
    }


class Workshop:
    """Makes heads and experts from one base encoder.

    Args:
        base: Folder of the base encoder.
        output: Heads go to ``heads/``, experts to ``experts/`` in it.
        settings: How to train.
        narrator: Told of stages.
        encoder: The base, if it is loaded already.
    """

    def __init__(
        self,
        base: Path,
        output: Path,
        settings: DemoSettings,
        narrator: Narrator,
        encoder: Encoder | None = None,
    ) -> None:
        self.base = base
        self.encoder = Encoder.load(base) if encoder is None else encoder
        self._output = output
        self._settings = settings
        self._narrator = narrator
        self.base_hash = file_hash(base / "model.safetensors")

    def head(self, task: Task) -> Head:
        """The task's linear probe on features of the base."""
        path = self._output / "heads" / f"{task.name}.safetensors"
        key = content_key(self._head_record(task))
        head = Head.load(path, key)
        if head is None:
            with self._narrator.stage(f"Head of {task.name}", len(task.train)) as advance:
                features = self.encoder.features(task.train.texts, task.max_length, advance=advance)
                head = fit_head(features, task.train.labels, self._settings.inverse_penalty)
                head.save(path, key)
        return head

    def expert(self, task: Task, head: Head) -> Path:
        """Folder of the task's expert: the base, fine-tuned under the task's head."""
        folder = self._output / "experts" / task.name
        tuning = self._settings.fine_tuning
        record = {**self._head_record(task), "fine_tuning": asdict(tuning)}
        if is_made(folder, record):
            self._narrator.say(f"Expert of {task.name}: made before, reused")
            return folder

        def fill(partial: Path) -> None:
            expert = replace(self.encoder, model=copy.deepcopy(self.encoder.model))
            total = tuning.epochs * len(task.train)
            with self._narrator.stage(f"Expert of {task.name}", total) as advance:
                fine_tune(expert, head, task.train, task.max_length, tuning, advance)
            expert.save(partial)

        make_folder(folder, record, fill)
        return folder

    def _head_record(self, task: Task) -> dict[str, Any]:
        """Everything that a head depends on; the texts by their hash."""
        return {
            "format": _FORMAT,
            "base": self.base_hash,
            "task": task.name,
            "training_data": content_key(asdict(task.train)),
            "max_length": task.max_length,
            "inverse_penalty": self._settings.inverse_penalty,
            "threads": self._settings.threads,
            "torch": torch.__version__,
        }
