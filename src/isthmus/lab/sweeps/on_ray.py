"""Runs on Ray, on this machine or on a cluster whose nodes share the sweep's folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.errors import IsthmusError
from isthmus.lab.sweeps.record import RunRecord, write_record
from isthmus.lab.sweeps.work import Work, execute


def run_on_ray(works: Sequence[Work], workers: int) -> Iterator[RunRecord]:
    """Execute runs as Ray's tasks; records come as runs end.

    A Ray that is running already is used: the one that this process is connected to, or else the one that
    ``RAY_ADDRESS`` names. Otherwise one is started here, and ended afterwards.

    Args:
        works: The runs.
        workers: CPUs of a Ray that is started here.

    Raises:
        IsthmusError: Ray is not installed, or cannot be reached.
        OutputError: A record cannot be written.
    """
    try:
        import ray
    except ImportError as error:
        raise IsthmusError("Ray is not installed", "pip install 'isthmus[ray]'") from error
    ours = not ray.is_initialized()
    if ours:
        _start(workers)
    try:
        remote = ray.remote(num_cpus=1, max_retries=0)(execute)
        pending = {remote.remote(work): work for work in works}
        while pending:
            ready, _ = ray.wait(list(pending))
            for task in ready:
                work = pending.pop(task)
                try:
                    yield ray.get(task)
                except ray.exceptions.RayTaskError as error:
                    # The disk's errors are the sweep's; see `execute`.
                    raise error.as_instanceof_cause() from error
                except ray.exceptions.RayError as error:
                    yield _lost(work, error)
    finally:
        if ours:
            ray.shutdown()


def _start(workers: int) -> None:
    import os

    import ray

    try:
        if os.environ.get("RAY_ADDRESS"):
            ray.init(log_to_driver=False)
        else:
            ray.init(num_cpus=workers, include_dashboard=False, log_to_driver=False)
    except (ConnectionError, OSError, ValueError) as error:
        raise IsthmusError(f"Ray cannot be reached: {error}", "See to RAY_ADDRESS.") from error


def _lost(work: Work, error: Exception) -> RunRecord:
    reason = str(error).strip().splitlines()[0]
    record = RunRecord(work.name, work.settings, "failed", {}, 0.0, f"Ray lost it: {reason}")
    work.folder.mkdir(parents=True, exist_ok=True)
    write_record(work.folder, record)
    return record
