"""Running a plan: workers, journal, resume, and the move into place."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from threadpoolctl import threadpool_limits

from isthmus.checkpoints import ShardWriter, atomic_write_text, copy_sidecars
from isthmus.engine.aligning import settle
from isthmus.engine.hashing import hash_range, new_hash
from isthmus.engine.journal import Entry, Journal
from isthmus.engine.manifest import MANIFEST, FileRecord, Manifest, read_manifest
from isthmus.engine.output import check_output, source_records
from isthmus.engine.plan import Plan
from isthmus.engine.progress import Progress, Silent
from isthmus.engine.remarks import Remarks, told
from isthmus.engine.stage import FOLDER, StageReport
from isthmus.engine.streams import Buffers, StoppedError
from isthmus.engine.tasks import ApplyTask, Task, UpdateTask, is_merge
from isthmus.engine.worker import Made, Worker
from isthmus.engine.workspace import Workspace, complete_commit, is_finished, open_workspace
from isthmus.errors import OutputError, PlanError
from isthmus.typing import StorageArray


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a merge did.

    Attributes:
        out: The output folder.
        merged: How many tensors were merged.
        carried: How many were taken from the donor.
        resumed: How many had been finished by an earlier run.
        notes: What the user should know.
    """

    out: Path
    merged: int
    carried: int
    resumed: int
    notes: tuple[str, ...]


@dataclass(slots=True)
class _Results:
    """Hashes, notes and remarks of finished tensors."""

    digests: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    remarks: list[Remarks] = field(default_factory=list)

    def add(self, made: Made) -> None:
        """Take down what one task made."""
        self.digests |= made.digests
        if made.note is not None:
            self.notes.append(made.note)
        if made.remarks is not None:
            self.remarks.append(made.remarks)

    def told(self) -> list[str]:
        """Notes for the user, the same whatever the order of the tasks."""
        return [*sorted(self.notes), *told(self.remarks)]


def default_workers() -> int:
    """One for each processor that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(
    plan: Plan,
    out: Path,
    *,
    version: str,
    card: Callable[[Plan], str],
    workers: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Carry out a plan.

    The output is complete or absent: files are written below `OUT/.isthmus/` and move up at the
    end. A merge that was interrupted, however rudely, goes on with `resume` and ends in the same
    bytes.

    Args:
        plan: What to do.
        out: The output folder.
        version: Of Isthmus, for the manifest.
        card: Writes the model card.
        workers: Threads; by default one a processor. They change the speed and nothing else.
        resume: Go on with an interrupted merge.
        overwrite: Replace an earlier merge. Its files stay until the new ones are complete.
        progress: Who listens.

    Raises:
        PlanError: if the output would lie over an input, or the disk is too small.
        OutputError: if the folder cannot be used, or `resume` finds another merge in it.
        NonFiniteError: if an input holds NaN or infinity and may not.
    """
    workers = default_workers() if workers is None else workers
    if workers < 1:
        raise PlanError(f"{workers} workers cannot merge anything", "Use one or more.")
    try:
        out = out.absolute()
    except FileNotFoundError as error:
        raise OutputError(
            f"{out} is relative to a folder that is gone", "Go to another folder first."
        ) from error
    if resume or overwrite:
        complete_commit(out)
    check_output(plan, out, version=version, resume=resume, overwrite=overwrite)
    if resume and is_finished(out):
        return _outcome(plan, out, resumed=plan.count, notes=read_manifest(out).notes)
    with open_workspace(out, plan.digest, resume=resume, overwrite=overwrite) as space:
        progress = progress or Silent()
        moved = settle(plan.models, plan.recipe.align, progress)
        stage = StageReport()
        if plan.stage is not None:
            stage = plan.stage.run(space.work / FOLDER, progress)
        results, resumed = _write_shards(plan, space, workers, progress)
        finished = []
        if plan.finisher is not None:
            changed = plan.finisher.run(space.staging, plan.layout, progress)
            results.digests |= changed
            finished = [plan.finisher.told(changed)]
        notes = [*plan.notes, *moved, *stage.notes, *results.told(), *finished]
        texts = {"README.md": card(plan), **plan.texts, **stage.texts}
        _write_rest(plan, space, results, notes, version, texts)
        return _outcome(plan, out, resumed=resumed, notes=notes)


def _outcome(plan: Plan, out: Path, *, resumed: int, notes: Sequence[str]) -> Outcome:
    merged = sum(len(task.outputs) for task in plan.tasks if is_merge(task))
    return Outcome(out, merged, plan.count - merged, resumed, tuple(notes))


def _write_shards(
    plan: Plan, space: Workspace, workers: int, progress: Progress
) -> tuple[_Results, int]:
    """Write every tensor; returns hashes and notes, and how many an earlier run had written."""
    stop = threading.Event()
    worker = Worker(plan, progress, stop, Buffers())
    results = _Results()
    with _shard_writers(plan, space) as writers, Journal(space.journal) as journal:
        for made in _finished(journal, plan, space, workers) if space.resumed else ():
            results.add(made)
        resumed = len(results.digests)
        sink = _Shards({name: writer for writer in writers for name in writer.shard.tensors})

        def make(task: Task) -> None:
            made = worker.make(task, sink)
            remarks = None if made.remarks is None else made.remarks.as_data()
            journal.record(made.digests, made.note, remarks)
            results.add(made)

        todo = [task for task in plan.tasks if task.outputs[0].name not in results.digests]
        progress.begin("merging", sum(info.nbytes for task in todo for info in task.outputs))
        try:
            _in_parallel(make, todo, workers, stop)
            for writer in writers:
                writer.sync()
        finally:
            progress.finish()
    return results, resumed


@dataclass(frozen=True, slots=True)
class _Shards:
    """Every shard's writer, by the names of its tensors."""

    writers: Mapping[str, ShardWriter]

    def write(self, name: str, start: int, array: StorageArray) -> None:
        """Write elements of one tensor to its shard."""
        self.writers[name].write(name, start, array)


@contextmanager
def _shard_writers(plan: Plan, space: Workspace) -> Iterator[list[ShardWriter]]:
    writers: list[ShardWriter] = []
    try:
        for shard in plan.layout.shards:
            path = space.staging / shard.file
            writers.append(ShardWriter(path, shard, resume=space.resumed))
        yield writers
    finally:
        for writer in writers:
            writer.close()


def _in_parallel(
    make: Callable[[Task], None],
    todo: Sequence[Task],
    workers: int,
    stop: threading.Event,
) -> None:
    """Call `make` for each entry; the first failure, or Ctrl-C, stops all of them."""
    with (
        _one_thread_each(todo),
        ThreadPoolExecutor(workers, thread_name_prefix="merge") as pool,
    ):
        try:
            futures = [pool.submit(make, task) for task in todo]
            _, waiting = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
        if waiting:
            stop.set()
            pool.shutdown(cancel_futures=True)
    failures = [future.exception() for future in futures if not future.cancelled()]
    for failure in failures:
        if failure is not None and not isinstance(failure, StoppedError):
            raise failure


@contextmanager
def _one_thread_each(todo: Sequence[Task]) -> Iterator[None]:
    """A worker is one thread: its products are too small to share, and their threads would spin.

    It also keeps results from depending on the number of processors.
    """
    with ExitStack() as stack:
        if any(isinstance(task, UpdateTask | ApplyTask) for task in todo):
            from isthmus.geometry.linalg import one_thread

            stack.enter_context(one_thread())
        stack.enter_context(threadpool_limits(limits=1))
        yield


def _finished(journal: Journal, plan: Plan, space: Workspace, workers: int) -> list[Made]:
    """Journalled tensors whose bytes are in the files as the journal says."""
    places = {
        name: (space.staging / shard.file, shard.positions[name], info.nbytes)
        for shard in plan.layout.shards
        for name, info in shard.tensors.items()
    }

    def intact(entry: Entry) -> bool:
        return all(hash_range(*places[name]) == xxh3 for name, xxh3 in entry.digests.items())

    # A tensor that was made twice is taken down twice, and the later entry counts.
    known = {
        next(iter(entry.digests)): entry
        for entry in journal.recorded
        if entry.digests and all(name in places for name in entry.digests)
    }
    with ThreadPoolExecutor(workers) as pool:
        checks = pool.map(intact, known.values())
        return [
            Made(
                entry.digests,
                entry.note,
                None if entry.remarks is None else Remarks.of_data(dict(entry.remarks)),
            )
            for entry, whole in zip(known.values(), checks, strict=True)
            if whole
        ]


def _write_rest(
    plan: Plan,
    space: Workspace,
    results: _Results,
    notes: Sequence[str],
    version: str,
    texts: Mapping[str, str],
) -> None:
    """Write all that is not weights, then move everything into place."""
    sidecars = copy_sidecars(plan.donor, space.staging, plan.out_dtype)
    index = plan.layout.index()
    if index is not None:
        texts = {**texts, index[0]: index[1]}
    for name, text in texts.items():
        atomic_write_text(space.staging / name, text)
    files = _shard_records(plan, results.digests)
    for name in sorted({*sidecars, *texts}):
        path = space.staging / name
        size = path.stat().st_size
        files[name] = FileRecord(size=size, xxh3=hash_range(path, 0, size))
    manifest = Manifest(
        isthmus=version,
        recipe=plan.recipe.to_yaml(),
        sources=source_records(plan),
        notes=list(notes),
        files=files,
    )
    atomic_write_text(space.staging / MANIFEST, manifest.to_json())
    space.commit(list(files))


def _shard_records(plan: Plan, digests: Mapping[str, str]) -> dict[str, FileRecord]:
    return {
        shard.file: FileRecord(
            size=shard.size,
            xxh3=new_hash(shard.header).hexdigest(),
            tensors={name: digests[name] for name in shard.tensors},
        )
        for shard in plan.layout.shards
    }
