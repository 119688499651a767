"""What `isthmus lab sweep` and `isthmus lab runs` do."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from isthmus.cli.interrupts import listen_to_kill
from isthmus.errors import IsthmusError, OutputError
from isthmus.lab.grid import Grid
from isthmus.lab.progress import Narrator
from isthmus.lab.sweeps.index import read_index
from isthmus.lab.sweeps.reading import read_sweep
from isthmus.lab.sweeps.record import RunRecord
from isthmus.lab.sweeps.run import Executor, read_runs, rebuilt, run_sweep

_FAILURES = 5
"""Failed runs whose errors are printed."""
_GAP = 2
"""Characters between two columns of a table."""


def sweep(
    file: Path,
    out: Path,
    cache: Path,
    *,
    workers: int,
    threads: int,
    executor: Executor,
    retry_failed: bool,
) -> None:
    """Run the sweep of a file.

    Raises:
        IsthmusError: Something in the file is wrong, or runs failed.
        Exit: With 130, after Ctrl-C.
    """
    narrator = Narrator()
    listen_to_kill()
    try:
        records = run_sweep(
            read_sweep(file),
            out,
            workers=workers,
            executor=executor,
            threads=threads,
            retry_failed=retry_failed,
            cache=cache,
            narrator=narrator,
        )
    except KeyboardInterrupt:
        typer.echo("stopped. The same command goes on where it was.", err=True)
        raise typer.Exit(130) from None
    failed = [record for record in records if record.status == "failed"]
    narrator.say(f"`isthmus lab runs {out}` shows what they found")
    if failed:
        raise IsthmusError(
            f"{len(failed)} of {len(records)} runs failed, such as {failed[0].name}: {failed[0].error}",
            "`--retry-failed` runs them again.",
        )


def runs(folder: Path, *, rebuild: bool, as_csv: bool) -> str:
    """The runs of a sweep as a table or as CSV.

    Raises:
        OutputError: There is no sweep.
    """
    records: Sequence[RunRecord]
    if rebuild:
        records = rebuilt(folder)
    else:
        try:
            records = read_index(folder)
        except OutputError:
            # It is derived, and looking something up should not need a second command.
            records = _mended(folder)
    if as_csv:
        return _csv(records)
    narrator = Narrator()
    lines = [f"{len(records)} runs are over"]
    if records:
        grid, hidden = _grid(folder, records, narrator.console.width)
        narrator.console.print(grid.table())
        if hidden:
            lines.append(f"{len(hidden)} figures have no room here; --csv has them")
    failed = [record for record in records if record.status == "failed"]
    lines += [f"{record.name[:8]} failed: {record.error}" for record in failed[:_FAILURES]]
    if len(failed) > _FAILURES:
        lines.append(f"and {len(failed) - _FAILURES} more failed; --csv has their errors")
    return "\n".join(lines)


def _mended(folder: Path) -> Sequence[RunRecord]:
    """The runs by their folders; the index is made anew where it can be."""
    try:
        return rebuilt(folder)
    except OutputError:
        return read_runs(folder)


def _csv(records: Sequence[RunRecord]) -> str:
    rows = [_flat(record) for record in records]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def _grid(folder: Path, records: Sequence[RunRecord], width: int) -> tuple[Grid, list[str]]:
    """Settings that differ between runs, as many figures as have room, and the names of the others.

    Gains come first: they are what most experiments are about.
    """
    rows = [_flat(record) for record in records]
    settings = list(dict.fromkeys(key for record in records for key in record.settings))
    differ = [key for key in settings if len({str(row.get(key)) for row in rows}) > 1]
    figures = dict.fromkeys(
        key
        for record in records
        for key, value in record.metrics.items()
        if isinstance(value, float) and key not in settings
    )
    first = sorted(figures, key=lambda name: (name != "noise_scale", "gain" not in name))
    room = width - 4 - (8 + _GAP) - (max(len(record.status) for record in records) + _GAP)
    shown, hidden = [], []
    for name in [*differ, *first]:
        room -= _width(name, rows)
        if room < 0 and name in figures:
            hidden.append(name)
        else:
            shown.append(name)
    cells = [
        (row["run"][:8], row["status"], *(_cell(row.get(key, "")) for key in shown)) for row in rows
    ]
    headings = [name.replace("_", " ") for name in shown]
    return Grid(str(folder), ("run", "", *headings), tuple(cells)), hidden


def _width(name: str, rows: Sequence[Mapping[str, Any]]) -> int:
    """Characters of a column, whose heading folds between words."""
    words = [*name.split("_"), *(_cell(row.get(name, "")) for row in rows)]
    return max(4, *map(len, words)) + _GAP


def _flat(record: RunRecord) -> dict[str, Any]:
    plain: Mapping[str, Any] = {
        key: value if isinstance(value, str | int | float) else json.dumps(value)
        for key, value in {**record.settings, **record.metrics}.items()
    }
    return {
        "run": record.name,
        "status": record.status,
        "seconds": record.seconds,
        **plain,
        "error": record.error or "",
    }


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
