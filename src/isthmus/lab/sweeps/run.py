"""Running a sweep."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Literal

from isthmus.checkpoints.locking import locked
from isthmus.errors import IsthmusError, OutputError
from isthmus.lab.progress import Narrator
from isthmus.lab.sweeps.experiments import EXPERIMENTS, Experiment, experiment_of
from isthmus.lab.sweeps.folder import names_of, records_of, run_folder, sweep_folder
from isthmus.lab.sweeps.index import add_to_index, rebuild_index
from isthmus.lab.sweeps.local import Tell, run_locally
from isthmus.lab.sweeps.on_ray import run_on_ray
from isthmus.lab.sweeps.plan import Sweep, planned
from isthmus.lab.sweeps.record import RunRecord
from isthmus.lab.sweeps.telling import telling
from isthmus.lab.sweeps.work import Work

Executor = Literal["local", "ray"]

_CROWD = 8
"""Processes for each core; more would only use up the memory."""

__all__ = ["Executor", "RunRecord", "read_runs", "rebuilt", "run_sweep"]


def run_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    workers: int = 2,
    executor: Executor = "local",
    threads: int = 1,
    retry_failed: bool = False,
    cache: Path = Path(".cache"),
    narrator: Narrator | None = None,
    experiments: Mapping[str, Experiment] = EXPERIMENTS,
) -> tuple[RunRecord, ...]:
    """Do the runs that are not over yet.

    What a run finds depends on its settings alone, not on how many run side by side or where.

    Args:
        sweep: The runs.
        folder: Made if it is missing. Runs that are over there are not done again; the sweep may have
            grown since.
        workers: Runs side by side.
        executor: ``local`` processes, or ``ray``.
        threads: Torch's, of each run; results may depend on them in their last bits.
        retry_failed: Do runs again that failed. Those that diverged would diverge again.
        cache: Where `make data` put its data.
        narrator: Shows the progress; on standard output by default.
        experiments: By name.

    Returns:
        The records of all runs, in the order of the sweep.

    Raises:
        IsthmusError: An unknown experiment, settings that it refuses, or many more workers than cores; see also
            `planned`.
        OutputError: The folder is another sweep's, in use, or cannot be written.
    """
    if workers < 1 or threads < 1:
        raise IsthmusError(
            f"{workers} workers of {threads} threads do nothing", "Give 1 or more of each."
        )
    most = _CROWD * (os.cpu_count() or 1)
    if executor == "local" and max(workers, threads) > most:
        raise IsthmusError(
            f"{workers} workers of {threads} threads are too many for the {os.cpu_count()} cores of this machine",
            f"Give {most} of each at the most; one worker of one thread a core is fastest.",
        )
    experiment = experiment_of(sweep.experiment, experiments)
    runs = planned(sweep, experiment)
    names = [run.name for run in runs]
    with sweep_folder(folder, experiment, runs):
        found = dict(records_of(folder, names))
        if retry_failed:
            found = {place: each for place, each in found.items() if each.status != "failed"}
        rebuild_index(folder, found.items())
        works = [
            Work(
                experiment,
                run.name,
                run.settings,
                run_folder(folder, run.name).absolute(),
                cache.absolute(),
                threads,
            )
            for place, run in enumerate(runs)
            if place not in found
        ]
        places = {name: place for place, name in enumerate(names)}
        with (
            telling(narrator or Narrator(), len(runs), list(found.values())) as told,
            closing(_executed(works, workers, executor, told.share)) as records,
        ):
            for record in records:
                found[places[record.name]] = record
                try:
                    add_to_index(folder, places[record.name], record)
                except OutputError:
                    # Somebody removed or damaged it meanwhile, or the disk is full, and this fails too.
                    rebuild_index(folder, found.items())
                told.over(record)
    return tuple(found[place] for place in range(len(runs)))


def rebuilt(folder: Path) -> tuple[RunRecord, ...]:
    """Make the index of a sweep anew from the folders of its runs.

    Raises:
        OutputError: There is no sweep, one is running there, or the index cannot be written.
    """
    names = names_of(folder)
    with locked(folder, "a sweep is running in"):
        records = records_of(folder, names)
        rebuild_index(folder, records)
    return tuple(record for _, record in records)


def read_runs(folder: Path) -> tuple[RunRecord, ...]:
    """The runs of a sweep that are over, without writing anything.

    Raises:
        OutputError: There is no sweep.
    """
    return tuple(record for _, record in records_of(folder, names_of(folder)))


def _executed(
    works: list[Work], workers: int, executor: Executor, tell: Tell
) -> Generator[RunRecord, None, None]:
    if not works:
        return
    if executor == "ray":
        yield from run_on_ray(works, workers)
    else:
        yield from run_locally(works, workers, tell)
