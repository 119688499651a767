"""The demo's results as tables for a terminal, and the sentences that belong to them."""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from isthmus.lab.evaluate import Row
from isthmus.lab.results import DemoResults

if TYPE_CHECKING:
    from isthmus.lab.reactions import ReactionResults

USUAL_ACCURACY = 0.75
"""The accuracy whose standard error is given as an example."""

WHY_THE_BASE_WINS = (
    "The base is expected to win: guessing masked symbols is what it was trained for, and the head "
    "that guesses is its own; the fine-tunes were trained for other things. This checks that the "
    "merged model loads and computes, and no more."
)


def accuracy_table(results: DemoResults) -> Table:
    """Test accuracy in percent, and in brackets as a share of the expert's, for every encoder."""
    table = Table(
        title="Test accuracy in % (in brackets: % of the task's expert)",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
    )
    table.add_column("encoder")
    for task in results.tasks:
        table.add_column(Text(task), justify="right")
    table.add_column("mean", justify="right")
    table.add_column("merge", justify="right")
    kind = None
    for row in results.rows:
        if kind not in (None, row.kind):
            table.add_section()
        kind = row.kind
        table.add_row(
            Text(label(row)),
            *(cell(row.accuracy[task], row.normalised[task]) for task in results.tasks),
            cell(row.mean_accuracy, row.mean_normalised),
            "" if row.merge_seconds is None else f"{row.merge_seconds:.1f} s",
        )
    return table


def label(row: Row) -> str:
    """Name of an encoder, with the coefficient that it was merged with."""
    return f"{row.name} {row.setting}" if row.setting else row.name


def cell(accuracy: float, normalised: float) -> str:
    """Both figures of one cell, in percent."""
    return f"{100 * accuracy:.1f} ({100 * normalised:.0f})"


def remarks(results: DemoResults) -> Iterator[str]:
    """What stands below the table, one sentence or two a line."""
    for row in results.rows:
        if row.note:
            yield f"{row.name}: {row.note}."
    test = min(results.settings.sizes[task].test for task in results.tasks)
    error = sqrt(USUAL_ACCURACY * (1 - USUAL_ACCURACY) / test)
    yield (
        f"Standard error of an accuracy: ±{100 * error:.1f} points at {100 * USUAL_ACCURACY:.0f} % "
        f"with {test} examples. Do not read a ranking into a point."
    )
    for method, choice in results.choices.items():
        if choice.at_edge:
            yield (
                f"{method}: {choice.setting} lies at the edge of its grid "
                f"({', '.join(choice.validation)}); a value beyond may do better."
            )


def reaction_remarks(found: ReactionResults) -> Iterator[str]:
    """The merge of the reaction models, in sentences."""
    distances = ", ".join(f"{name} {value:.3f}" for name, value in found.distances.items())
    recovered = ", ".join(f"{name} {hits}" for name, hits in found.recovered.items())
    yield (
        f"Reaction models (rxnfp, TIES on {found.common_tensors} common tensors, "
        f"{found.merge_seconds:.1f} s): relative distance to the base {distances}, "
        f"merged {found.merged_distance:.3f}; cosine of the task vectors {found.cosine:.3f}; "
        f"masked symbols recovered, of {found.masked_symbols}: {recovered}."
    )
    yield WHY_THE_BASE_WINS
