"""One run, wherever it is executed."""

from __future__ import annotations

import errno
import json
import math
import shutil
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from isthmus.checkpoints import atomic_write_text
from isthmus.checkpoints.locking import not_writable
from isthmus.errors import IsthmusError, OutputError
from isthmus.lab.machine import torch_threads
from isthmus.lab.sweeps.diverged import Diverged
from isthmus.lab.sweeps.experiments import Experiment
from isthmus.lab.sweeps.record import RunRecord, Status, write_record

CONFIG = "config.json"

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_FULL = 2**20
"""Bytes; with fewer of them left it is for want of room that a run broke: not every library says so."""


@dataclass(frozen=True)
class Work:
    """What a worker needs to know of a run.

    Attributes:
        experiment: What to do.
        name: Of the run.
        settings: All of them.
        folder: Of the run.
        cache: Where `make data` put its data.
        threads: Torch's.
    """

    experiment: Experiment
    name: str
    settings: Mapping[str, Any]
    folder: Path
    cache: Path
    threads: int


def execute(work: Work, tell: Callable[[float], None] = lambda _share: None) -> RunRecord:
    """Do a run, and declare it over.

    An error of the experiment is the run's, and is recorded; one of the disk is raised.

    Args:
        work: The run.
        tell: Told the share that is done.

    Raises:
        OutputError: The run's folder cannot be written.
    """
    try:
        work.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise not_writable(work.folder, error) from error
    config = {"experiment": work.experiment.name, "settings": work.settings}
    atomic_write_text(work.folder / CONFIG, json.dumps(config, indent=1) + "\n")
    begun = monotonic()
    status: Status = "done"
    metrics: Mapping[str, Any] = {}
    message = None
    try:
        with torch_threads(work.threads):
            settings = work.experiment.model().model_validate(dict(work.settings))
            metrics = work.experiment.called()(settings, work.folder, tell, cache=work.cache)
            json.dumps(metrics, allow_nan=False)
    except Diverged as error:
        status, metrics = "diverged", {"diverged_step": error.step}
        if math.isfinite(error.loss):
            metrics = {**metrics, "diverged_loss": error.loss}
    except IsthmusError as error:
        status, metrics, message = "failed", {}, str(error)
    except Exception as error:
        if _for_want_of_room(error, work.folder):
            raise OutputError(
                f"{work.folder} cannot be written: the disk is full",
                "Make room. The same sweep goes on; nothing that is over is lost.",
            ) from error
        last = traceback.extract_tb(error.__traceback__)[-1]
        status, metrics = "failed", {}
        message = f"{type(error).__name__}: {error} (in {Path(last.filename).name}:{last.lineno})"
    record = RunRecord(
        work.name, work.settings, status, metrics, round(monotonic() - begun, 3), message
    )
    write_record(work.folder, record)
    for checkpoint in work.folder.glob("*.pt"):
        checkpoint.unlink()
    return record


def _for_want_of_room(error: Exception, folder: Path) -> bool:
    if isinstance(error, OSError) and error.errno in _DISK:
        return True
    return shutil.disk_usage(folder).free < _FULL
