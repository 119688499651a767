"""A table of all runs in SQLite. It is derived: the runs' folders say what happened."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from isthmus.errors import OutputError
from isthmus.lab.sweeps.record import RunRecord, checked

INDEX = "index.sqlite"

_COLUMNS = ("position", "name", "status", "seconds", "settings", "metrics", "error")


def rebuild_index(folder: Path, records: Iterable[tuple[int, RunRecord]]) -> None:
    """Write the index anew, whatever was there.

    Args:
        folder: Of the sweep.
        records: Of the runs that are over, each with its place in the sweep.

    Raises:
        OutputError: It cannot be written.
    """
    with _telling(folder):
        for old in folder.glob(f"{INDEX}*"):
            old.unlink()
        with closing(sqlite3.connect(folder / INDEX)) as base, base:
            base.execute(
                "CREATE TABLE runs (position INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, "
                "status TEXT NOT NULL, seconds REAL NOT NULL, settings TEXT NOT NULL, "
                "metrics TEXT NOT NULL, error TEXT)"
            )
            _insert(base, records)


def add_to_index(folder: Path, position: int, record: RunRecord) -> None:
    """Add a run that is over.

    Raises:
        OutputError: It cannot be written.
    """
    with _telling(folder), closing(sqlite3.connect(folder / INDEX)) as base, base:
        _insert(base, [(position, record)])


def read_index(folder: Path) -> list[RunRecord]:
    """The runs in the index, in the order of the sweep.

    Raises:
        OutputError: It is missing or damaged.
    """
    path = folder / INDEX
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as base:
            rows = base.execute(
                f"SELECT {', '.join(_COLUMNS[1:])} FROM runs ORDER BY position"  # noqa: S608 (constants)
            ).fetchall()
        named = [dict(zip(_COLUMNS[1:], row, strict=True)) for row in rows]
        return [
            checked({**row, **{key: json.loads(row[key]) for key in ("settings", "metrics")}})
            for row in named
        ]
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise OutputError(
            f"{path} is no index of a sweep: {error}",
            "`isthmus lab runs --rebuild` makes it anew from the runs' folders.",
        ) from error


def _insert(base: sqlite3.Connection, records: Iterable[tuple[int, RunRecord]]) -> None:
    marks = ", ".join("?" for _ in _COLUMNS)
    base.executemany(
        f"INSERT OR REPLACE INTO runs ({', '.join(_COLUMNS)}) VALUES ({marks})",  # noqa: S608 (constants)
        [
            (
                position,
                record.name,
                record.status,
                record.seconds,
                json.dumps(record.settings),
                json.dumps(record.metrics),
                record.error,
            )
            for position, record in records
        ],
    )


@contextmanager
def _telling(folder: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise OutputError(
            f"{folder / INDEX} cannot be written: {error}",
            "See that its folder is yours and has room; runs that are over are kept.",
        ) from error
