"""Making one output tensor: read chunks, merge, round, hash, write."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from isthmus.checkpoints import Dtype, TensorInfo
from isthmus.checkpoints.dtypes import encode
from isthmus.engine.hashing import new_hash
from isthmus.engine.plan import Plan
from isthmus.engine.progress import Progress
from isthmus.engine.remarks import Remarks
from isthmus.engine.streams import (
    Buffers,
    CheckpointStream,
    StoppedError,
    lies_within,
    require_finite,
)
from isthmus.engine.tasks import (
    ApplyTask,
    CarryTask,
    MergeTask,
    SolvedTask,
    Task,
    UpdateTask,
)
from isthmus.errors import NonFiniteError
from isthmus.methods.weighted import weighted_sum_of_bfloat16
from isthmus.typing import FloatArray, StorageArray


class Sink(Protocol):
    """Takes finished numbers, from several threads at once."""

    def write(self, name: str, start: int, array: StorageArray) -> None:
        """Take elements of the flattened tensor `name` from `start` on, in its storage type."""


@dataclass(frozen=True, slots=True)
class Made:
    """What came of a task.

    Attributes:
        digests: The hash of each output's bytes.
        note: For the user, or None.
        remarks: What came up at a module of adapters, or None.
    """

    digests: Mapping[str, str]
    note: str | None
    remarks: Remarks | None


@dataclass(frozen=True, slots=True)
class Worker:
    """Makes output tensors; one instance serves all threads.

    Attributes:
        plan: What to make.
        progress: Who listens.
        stop: Set when the work shall end early.
        buffers: Each thread's arrays.
    """

    plan: Plan
    progress: Progress
    stop: threading.Event
    buffers: Buffers

    def make(self, task: Task, sink: Sink) -> Made:
        """Write what a task makes.

        Raises:
            MethodError: if the method cannot merge what the adapters do to a module.
            NonFiniteError: if an input or the result holds NaN or infinity and may not.
            StoppedError: if `stop` was set meanwhile.
        """
        differing: set[str] = set()
        if isinstance(task, UpdateTask):
            return self._make_update(task, sink)
        if isinstance(task, MergeTask):
            chunks = self._merged(task)
        elif task.output.dtype is task.source.info.dtype:
            chunks = self._copied(task, differing)
        else:
            chunks = self._converted(task)
        digest = self._write(task.output, chunks, sink)
        note = (
            f"{task.output.name} is {task.output.dtype.value} and differs in "
            f"{', '.join(sorted(differing))}; it was copied from {self.plan.donor.label}"
            if differing
            else None
        )
        remarks = (
            task.adapter.merged(task.merge.module).remarks if isinstance(task, ApplyTask) else None
        )
        return Made({task.output.name: digest}, note, remarks)

    def _make_update(self, task: UpdateTask, sink: Sink) -> Made:
        if self.stop.is_set():
            raise StoppedError
        merged = task.merge.run()
        digests = {}
        for info, values in zip(task.outputs, (merged.a, merged.b, merged.bias), strict=False):
            assert values is not None
            if not (values.size == 0 or lies_within(values, info.dtype.largest)):
                raise _overflow(info)
            chunks = iter([encode(values.reshape(-1), info.dtype)])
            digests[info.name] = self._write(info, chunks, sink)
        return Made(digests, None, merged.remarks)

    def _write(self, output: TensorInfo, chunks: Iterator[StorageArray], sink: Sink) -> str:
        """Write one tensor; returns the hash of its bytes."""
        digest = new_hash()
        start = 0
        # Overflows and NaN are looked for in the results, and named.
        with np.errstate(all="ignore"):
            for chunk in chunks:
                if self.stop.is_set():
                    raise StoppedError
                sink.write(output.name, start, chunk)
                digest.update(chunk.view(np.uint8).data)
                start += chunk.size
                self.progress.advance(chunk.nbytes)
        return digest.hexdigest()

    def _merged(self, task: MergeTask) -> Iterator[StorageArray]:
        stream = CheckpointStream(
            base=task.base,
            experts=task.experts,
            compute=task.compute,
            chunk_size=self.plan.device.chunk_size,
            device=self.plan.device,
            buffers=self.buffers,
            check_finite=not (self.plan.allow_nonfinite or task.method.propagates),
            stop=self.stop,
        )
        combine = task.method.prepare(stream, task.settings)
        weighted = self.plan.on_bits(task)
        for start, count in stream.stretches():
            if weighted is not None:
                merged = np.empty(count, np.uint16)
                if weighted_sum_of_bfloat16(stream.read_codes(start, count), weighted, merged):
                    yield merged.view(task.output.dtype.storage)
                    continue
            values = self.plan.device.get(combine(stream.read(start, count)))
            if not self._fits(values, task.output):
                stream.require_finite(start, count)
                raise _overflow(task.output)
            yield encode(values, task.output.dtype)

    def _converted(self, task: CarryTask | ApplyTask | SolvedTask) -> Iterator[StorageArray]:
        wide = task.source.info.dtype is Dtype.F64
        compute = np.dtype(np.float64) if wide else np.dtype(np.float32)
        for start, count in self._stretches(task):
            (row,) = self.buffers.take(1, count, compute)
            task.source.model.read(task.source.name, start, row)
            if not self.plan.allow_nonfinite:
                require_finite(row, task.source, start)
            if not self._fits(row, task.output):
                raise _overflow(task.output)
            yield encode(row, task.output.dtype)

    def _copied(
        self, task: CarryTask | ApplyTask | SolvedTask, differing: set[str]
    ) -> Iterator[StorageArray]:
        """The donor's bytes; models whose numbers differ are added to `differing`."""
        source = task.source
        for start, count in self._stretches(task):
            stored = source.model.read_stored(source.name, start, start + count)
            if source.info.dtype.is_float and not self.plan.allow_nonfinite:
                require_finite(stored, source, start)
            for other in task.others if isinstance(task, CarryTask) else ():
                theirs = other.model.read_stored(other.name, start, start + count)
                if not np.array_equal(stored, theirs):
                    differing.add(other.model.label)
            yield stored

    def _stretches(self, task: CarryTask | ApplyTask | SolvedTask) -> Iterator[tuple[int, int]]:
        """Start and length of each chunk."""
        size, step = task.output.numel, self.plan.device.chunk_size
        return ((start, min(step, size - start)) for start in range(0, size, step))

    def _fits(self, values: FloatArray, output: TensorInfo) -> bool:
        """Whether the output format holds all values, or whatever happens is allowed."""
        return self.plan.allow_nonfinite or lies_within(values, output.dtype.largest)


def _overflow(output: TensorInfo) -> NonFiniteError:
    return NonFiniteError(
        f"the merged tensor {output.name} overflows {output.dtype.torch_name}",
        "Use smaller weights."
        if output.dtype.itemsize >= Dtype.F32.itemsize
        else "Write out_dtype: bfloat16 or float32 in the recipe, or use smaller weights.",
    )
