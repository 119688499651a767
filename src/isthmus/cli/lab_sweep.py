"""What `isthmus lab sweep` and `isthmus lab runs` do."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isthmus.errors import IsthmusError, OutputError
from isthmus.lab.grid import Grid
from isthmus.lab.progress import Narrator
from isthmus.lab.sweeps.index import read_index
from isthmus.lab.sweeps.reading import read_sweep
from isthmus.lab.sweeps.record import RunRecord
from isthmus.lab.sweeps.run import Executor, rebuilt, run_sweep


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
    """
    narrator = Narrator()
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
            records = rebuilt(folder)
    if as_csv:
        return _csv(records)
    narrator = Narrator()
    if records:
        narrator.console.print(_grid(folder, records).table())
    return f"{len(records)} runs are over"


def _csv(records: Sequence[RunRecord]) -> str:
    rows = [_flat(record) for record in records]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().rstrip("\n")


def _grid(folder: Path, records: Sequence[RunRecord]) -> Grid:
    """Settings that differ between runs, and figures."""
    rows = [_flat(record) for record in records]
    settings = list(dict.fromkeys(key for record in records for key in record.settings))
    differ = [key for key in settings if len({str(row.get(key)) for row in rows}) > 1]
    figures = dict.fromkeys(
        key for row in rows for key, value in row.items() if isinstance(value, float)
    )
    shown = [*differ, *(name for name in figures if name not in settings and name != "seconds")]
    cells = [
        (row["run"][:8], row["status"], *(_cell(row.get(key, "")) for key in shown)) for row in rows
    ]
    headings = [name.replace("_", " ") for name in shown]
    return Grid(str(folder), ("run", "", *headings), tuple(cells))


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
