"""The folder of a sweep: whose it is, who works in it, and which runs are over."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isthmus.checkpoints import atomic_write_text
from isthmus.checkpoints.locking import locked
from isthmus.errors import OutputError
from isthmus.lab.sweeps.experiments import Experiment
from isthmus.lab.sweeps.index import INDEX
from isthmus.lab.sweeps.plan import Planned
from isthmus.lab.sweeps.record import RunRecord, read_record

SWEEP = "sweep.json"
RUNS = "runs"
_FORMAT = 1
_NAME = re.compile("[0-9a-f]{16}")


class _DamagedError(OutputError):
    """The sweep's file is not whole."""


@contextmanager
def sweep_folder(folder: Path, experiment: Experiment, runs: Sequence[Planned]) -> Iterator[None]:
    """Hold a folder for a sweep: a new one, the same again, or one that has all its runs and more.

    Raises:
        OutputError: Another sweep's folder, somebody else's, one in use, or one that cannot be written.
    """
    with locked(folder, "another sweep is running in"):
        names = [run.name for run in runs]
        if _kept(folder, experiment, names) != names:
            content = {"format": _FORMAT, "experiment": experiment.name, "runs": names}
            atomic_write_text(folder / SWEEP, json.dumps(content, indent=1) + "\n")
        try:
            (folder / RUNS).mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"{folder / RUNS} cannot be made: {error.strerror}",
                "Remove what has its name, or see to its permissions.",
            ) from error
        yield


def run_folder(folder: Path, name: str) -> Path:
    """Where a run keeps its record and its checkpoints."""
    return folder / RUNS / name


def records_of(folder: Path, names: Sequence[str]) -> list[tuple[int, RunRecord]]:
    """The records of those runs that are over, each with its place."""
    found = ((place, read_record(run_folder(folder, name))) for place, name in enumerate(names))
    return [(place, record) for place, record in found if record is not None]


def names_of(folder: Path) -> list[str]:
    """The runs of the sweep in a folder.

    Raises:
        OutputError: There is no sweep, or its file is damaged.
    """
    content = _content(folder)
    if content is None:
        raise OutputError(f"{folder} holds no sweep: there is no {SWEEP}", "Name a sweep's folder.")
    return [str(name) for name in content["runs"]]


def _kept(folder: Path, experiment: Experiment, names: Sequence[str]) -> list[str] | None:
    """The runs that the sweep's file names; None if it must be written anew.

    A run's name is made from its experiment and its settings, so that folders of runs tell whose they are.
    """
    try:
        content = _content(folder)
    except _DamagedError:
        content = None
    else:
        if content is None:
            _refuse_foreign(folder)
    runs = _folders(folder) if content is None else [str(name) for name in content["runs"]]
    lost = len(set(runs) - set(names))
    if content is not None and content["experiment"] != experiment.name:
        difference = f"of {content['experiment']}, not of {experiment.name}"
    elif lost:
        difference = f"{lost} of its {len(runs)} runs are not in this one"
    else:
        return None if content is None else runs
    raise OutputError(
        f"{folder} holds another sweep: {difference}",
        "Choose another folder. A sweep can grow in its folder, but not lose runs.",
    )


def _refuse_foreign(folder: Path) -> None:
    ours = (INDEX, f".{SWEEP}.")
    foreign = [
        entry.name
        for entry in folder.iterdir()
        if entry.name != RUNS and not entry.name.startswith(ours)
    ]
    if foreign:
        raise OutputError(
            f"{folder} holds files that are no sweep's, such as {min(foreign)}",
            "Choose another folder, or an empty one.",
        )


def _folders(folder: Path) -> list[str]:
    place = folder / RUNS
    if not place.is_dir():
        return []
    return sorted(entry.name for entry in place.iterdir() if _NAME.fullmatch(entry.name))


def _content(folder: Path) -> dict[str, Any] | None:
    path = folder / SWEEP
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version, experiment, runs = content["format"], content["experiment"], content["runs"]
        # Names become paths.
        if not isinstance(experiment, str) or not all(map(_NAME.fullmatch, runs)):
            raise ValueError("it names runs as no sweep does")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise OutputError(
            f"{path} cannot be read: {error.strerror}",
            "See to its permissions.",
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise _DamagedError(
            f"{path} is damaged: {error}", "The same `isthmus lab sweep` again writes it anew."
        ) from error
    if version != _FORMAT:
        raise OutputError(
            f"{path} is of version {version}, not {_FORMAT}",
            "Use the Isthmus that wrote it, or another folder.",
        )
    return {"experiment": experiment, "runs": runs}
