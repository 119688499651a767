"""Labelled texts, and how they are divided into training, validation and test."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.errors import IsthmusError

_NOT_CONTENT = re.compile(r"https?://\S+|@\w+|\brt\b")


@dataclass(frozen=True)
class Corpus:
    """Everything that a source holds for one classification task.

    Attributes:
        name: Name of the task.
        classes: Class names; a label is an index into them.
        texts: The texts, ``N`` of them.
        labels: The labels, ``N`` of them.
    """

    name: str
    classes: tuple[str, ...]
    texts: tuple[str, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One part of a task's examples: as many labels as texts."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class Task:
    """A classification task divided into three parts that share no text.

    Attributes:
        name: Name of the task.
        classes: Class names; a label is an index into them.
        max_length: Texts are cut after so many tokens.
        train: What heads and experts learn from.
        validation: What merge coefficients are chosen on.
        test: What the reported accuracies come from, and nothing else.
    """

    name: str
    classes: tuple[str, ...]
    max_length: int
    train: Part
    validation: Part
    test: Part


def fingerprint(text: str) -> str:
    """What two texts have in common when one is a copy of the other.

    Case, punctuation, links, mentions and retweet marks do not count, because a tweet and its
    retweet in two parts of a split would leak the answer.
    """
    return " ".join(re.findall(r"\w+", _NOT_CONTENT.sub(" ", text.lower())))


def unique(corpus: Corpus) -> list[int]:
    """Indices of the texts to keep, in order: the first of each set of copies.

    Texts without content are dropped, and so is a set of copies whose labels disagree.
    """
    first: dict[str, int] = {}
    contradictory: set[str] = set()
    for index, text in enumerate(corpus.texts):
        key = fingerprint(text)
        if corpus.labels[first.setdefault(key, index)] != corpus.labels[index]:
            contradictory.add(key)
    return [index for key, index in first.items() if key and key not in contradictory]


def split(
    corpus: Corpus, *, train: int, validation: int, test: int, max_length: int, seed: int
) -> Task:
    """Draw three disjoint parts of the given sizes, the same for the same seed.

    Args:
        corpus: Where the examples come from; copies are removed first.
        train: Number of training examples.
        validation: Number of validation examples.
        test: Number of test examples.
        max_length: Number of tokens after which the task's texts are cut.
        seed: Fixes the draw.

    Raises:
        IsthmusError: The corpus holds too few distinct texts.
    """
    order = unique(corpus)
    wanted = train + validation + test
    if wanted > len(order):
        raise IsthmusError(
            f"The corpus {corpus.name!r} has {len(order)} distinct texts, but {wanted} are asked for.",
            "Lower the number of training, validation or test examples.",
        )
    random.Random(seed).shuffle(order)  # noqa: S311 (a reproducible draw, not a secret)

    def part(indices: Sequence[int]) -> Part:
        return Part(
            tuple(corpus.texts[i] for i in indices), tuple(corpus.labels[i] for i in indices)
        )

    # Test comes first, so that it stays the same when the number of training examples changes.
    return Task(
        name=corpus.name,
        classes=corpus.classes,
        max_length=max_length,
        test=part(order[:test]),
        validation=part(order[test : test + validation]),
        train=part(order[test + validation : wanted]),
    )
