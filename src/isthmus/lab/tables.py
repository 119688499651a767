"""The demo's results as tables for a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from isthmus.lab.evaluate import Row
from isthmus.lab.results import DemoResults


def accuracy_table(results: DemoResults) -> Table:
    """Test accuracy in percent, and in brackets as a share of the expert's, for every encoder."""
    table = Table(title="Test accuracy in % (in brackets: % of the task's expert)", box=SIMPLE_HEAD)
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
    """Name of an encoder, with what the reader must know about it."""
    return f"{row.name} ({row.note})" if row.note else row.name


def cell(accuracy: float, normalised: float) -> str:
    """Both figures of one cell, in percent."""
    return f"{100 * accuracy:.1f} ({100 * normalised:.0f})"
