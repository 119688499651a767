"""Runs side by side in processes of this machine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context, parent_process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from isthmus.errors import IsthmusError, OutputError
from isthmus.lab.machine import let_threads_sleep
from isthmus.lab.sweeps.record import RunRecord, write_record
from isthmus.lab.sweeps.work import Work, execute

Tell = Callable[[str, float], None]
"""Told the name of a run and the share of it that is done."""


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection[Any, Any]
    work: Work | None = None


def run_locally(works: Sequence[Work], workers: int, tell: Tell) -> Iterator[RunRecord]:
    """Execute runs, each in a process that does one after another; records come as runs end.

    A process that is killed, for want of memory for instance, makes its run a failed one, and another process
    takes its place. If the caller stops, or is killed, the processes end too.

    Args:
        works: The runs.
        workers: Processes.
        tell: For the progress.

    Raises:
        OutputError: A record cannot be written.
    """
    let_threads_sleep()
    waiting = list(reversed(works))
    crew = [_hired() for _ in range(min(workers, len(works)))]
    try:
        for worker in crew:
            _assign(worker, waiting)
        while busy := [worker for worker in crew if worker.work is not None]:
            heard = wait([worker.pipe for worker in busy])
            for worker in busy:
                if worker.pipe not in heard:
                    continue
                assert worker.work is not None
                try:
                    kind, value = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    yield _lost(worker)
                    crew[crew.index(worker)] = worker = _hired()
                    _assign(worker, waiting)
                    continue
                if kind == "share":
                    tell(*value)
                elif kind == "disk":
                    raise value
                else:
                    yield value
                    _assign(worker, waiting)
    finally:
        # Before the pipes are closed: nobody must note a broken one as the error of a run.
        for worker in crew:
            worker.process.kill()
        for worker in crew:
            worker.process.join()
            worker.pipe.close()


def _hired() -> _Worker:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    with _deaf():
        process.start()
    theirs.close()
    return _Worker(process, ours)


@contextmanager
def _deaf() -> Iterator[None]:
    """Processes that are begun here never hear of Ctrl-C or SIGTERM, which may go to a whole group.

    The sweep ends them. If they ended by themselves, their runs would count as failed.
    """
    # Otherwise the first process starts it, and starting it lets the signals through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _assign(worker: _Worker, waiting: list[Work]) -> None:
    worker.work = waiting.pop() if waiting else None
    if worker.work is not None:
        worker.pipe.send(worker.work)


def _lost(worker: _Worker) -> RunRecord:
    """The record of a run whose process is gone."""
    worker.process.join()
    work = worker.work
    assert work is not None
    code = worker.process.exitcode
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with {code}"
    record = RunRecord(
        work.name,
        work.settings,
        "failed",
        {},
        0.0,
        f"its process {how}; memory may have run out",
    )
    work.folder.mkdir(parents=True, exist_ok=True)
    write_record(work.folder, record)
    return record


def _serve(pipe: Connection[Any, Any]) -> None:
    """A worker process: a run after another, until the pipe is closed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            work = pipe.recv()
            try:
                record = execute(work, partial(_tell, pipe, work.name))
            except (OutputError, OSError) as error:
                told = error if isinstance(error, IsthmusError) else OutputError(str(error))
                pipe.send(("disk", told))
            else:
                pipe.send(("record", record))


def _tell(pipe: Connection[Any, Any], name: str, share: float) -> None:
    try:
        pipe.send(("share", (name, share)))
    except OSError:
        # The sweep is gone; as an exception this would be the run's.
        os._exit(1)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
