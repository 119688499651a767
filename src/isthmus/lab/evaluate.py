"""Accuracy per task, and accuracy as a share of the expert's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from isthmus.lab.text import Task

if TYPE_CHECKING:
    from isthmus.lab.encoders import Encoder
    from isthmus.lab.heads import Head

Accuracies = dict[str, float]
"""Accuracy between 0 and 1, by task."""


def evaluate(
    encoder: Encoder,
    heads: Mapping[str, Head],
    tasks: Mapping[str, Task],
    part: Literal["validation", "test"],
    advance: Callable[[int], None] | None = None,
) -> Accuracies:
    """Accuracy of one encoder on every task, each under the task's own head.

    Args:
        encoder: The base, an expert or a merged encoder.
        heads: A head per task, the same for every encoder.
        tasks: The tasks.
        part: Choose on validation, report on test.
        advance: Told how many texts a forward pass has done.
    """
    accuracies: Accuracies = {}
    for name, task in tasks.items():
        examples = task.validation if part == "validation" else task.test
        features = encoder.features(examples.texts, task.max_length, advance=advance)
        predicted = heads[name].logits(features).argmax(dim=1).tolist()
        hits = sum(a == b for a, b in zip(predicted, examples.labels, strict=True))
        accuracies[name] = hits / len(examples)
    return accuracies


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: The encoder: ``base``, an expert, or a merge method.
        kind: What the encoder is.
        accuracy: Test accuracy by task, between 0 and 1.
        normalised: The same divided by the task's own expert's accuracy; 1 is as good.
        merge_seconds: Time of the merge, where there was one.
        setting: What validation chose, such as ``λ=1``; empty where there was no choice.
        note: What the reader must know about this line; stands below the table.
    """

    name: str
    kind: Literal["base", "expert", "merged"]
    accuracy: Accuracies
    normalised: Accuracies
    merge_seconds: float | None = None
    setting: str = ""
    note: str = ""

    @property
    def mean_accuracy(self) -> float:
        """Mean accuracy over the tasks."""
        return fmean(self.accuracy.values())

    @property
    def mean_normalised(self) -> float:
        """Mean of the normalised accuracies over the tasks."""
        return fmean(self.normalised.values())


def normalise(accuracy: Mapping[str, float], expert: Mapping[str, float]) -> Accuracies:
    """Divide each task's accuracy by that of its own expert.

    Args:
        accuracy: Of the encoder in question, by task.
        expert: Of each task's own expert on that task.

    Returns:
        By task; 0 where the expert itself has no correct answer.
    """
    return {
        task: value / expert[task] if expert[task] > 0 else 0.0 for task, value in accuracy.items()
    }


def mean_row(rows: Sequence[Row]) -> Row:
    """The mean of one line over several runs, without setting and note."""
    first = rows[0]
    seconds = [row.merge_seconds for row in rows if row.merge_seconds is not None]
    return Row(
        first.name,
        first.kind,
        {task: fmean(row.accuracy[task] for row in rows) for task in first.accuracy},
        {task: fmean(row.normalised[task] for row in rows) for task in first.normalised},
        fmean(seconds) if seconds else None,
    )
