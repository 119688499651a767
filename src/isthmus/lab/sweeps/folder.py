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
from isthmus.lab.sweeps.plan import Planned
from isthmus.lab.sweeps.record import RunRecord, read_record

SWEEP = "sweep.json"
RUNS = "runs"
_FORMAT = 1


@contextmanager
def sweep_folder(folder: Path, experiment: Experiment, runs: Sequence[Planned]) -> Iterator[None]:
    """Hold a folder for a sweep: a new one, the same again, or one that has all its runs and more.

    Raises:
        OutputError: Another sweep's folder, somebody else's, one in use, or one that cannot be written.
    """
    with locked(folder, "another sweep is running in"):
        names = [run.name for run in runs]
        kept = _kept(folder, experiment, names)
        if kept != names:
            content = {"format": _FORMAT, "experiment": experiment.name, "runs": names}
            atomic_write_text(folder / SWEEP, json.dumps(content, indent=1) + "\n")
        try:
            (folder / RUNS).mkdir(exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"{folder / RUNS} cannot be made: {error.strerror}", "See to its permissions."
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
        OutputError: There is no sweep.
    """
    content = _content(folder)
    if content is None:
        raise OutputError(f"{folder} holds no sweep: there is no {SWEEP}", "Name a sweep's folder.")
    return [str(name) for name in content["runs"]]


def _kept(folder: Path, experiment: Experiment, names: Sequence[str]) -> list[str]:
    content = _content(folder)
    if content is None:
        if foreign := sorted(entry.name for entry in folder.iterdir()):
            raise OutputError(
                f"{folder} holds files that are no sweep's, such as {foreign[0]}",
                "Choose another folder, or an empty one.",
            )
        return []
    kept = [str(name) for name in content["runs"]]
    lost = set(kept) - set(names)
    if content["experiment"] != experiment.name or lost:
        raise OutputError(
            f"{folder} holds another sweep: "
            + (
                f"{len(lost)} of its {len(kept)} runs are not in this one"
                if content["experiment"] == experiment.name
                else f"of {content['experiment']}, not of {experiment.name}"
            ),
            "Choose another folder. A sweep can grow in its folder, but not lose runs.",
        )
    return kept


def _content(folder: Path) -> dict[str, Any] | None:
    path = folder / SWEEP
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError("it is of another version")
        # Names become paths.
        if not all(re.fullmatch("[0-9a-f]{16}", name) for name in content["runs"]):
            raise ValueError("it names runs as no sweep does")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise OutputError(
            f"{path} cannot be read: {error}",
            "Run the sweep into another folder; runs that are over can be moved there.",
        ) from error
    found: dict[str, Any] = content
    return found
