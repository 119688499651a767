"""The plan of a merge: every output tensor, what it is made of, and what it will cost.

A plan is made from headers and configurations alone. What can be known to fail fails here, before
a byte is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from isthmus.checkpoints import Dtype, ShardLayout
from isthmus.checkpoints.base import Source
from isthmus.engine.devices import Device, Processor
from isthmus.engine.finishing import Finisher
from isthmus.engine.stage import Stage
from isthmus.engine.tasks import ApplyTask, MergeTask, Task, UpdateTask
from isthmus.methods.method import Method, Reach, WeightedSum
from isthmus.recipes import Recipe

DEFAULT_SHARD_SIZE = 5_000_000_000
"""Bytes; the Hub's own default."""

HISTOGRAM = 8 * 2**16
"""Bytes of the counts from which a method learns about one row of a tensor."""


COMPILER_PAYS = 1_000_000_000
"""Bytes of weights to write from which loading compiled loops costs less than it saves."""


@dataclass(frozen=True)
class Plan:
    """What a merge will do.

    Attributes:
        recipe: The merge as it was asked for.
        method: Its method.
        tasks: What is made, in the order of the output files.
        layout: Which tensor lies where.
        donor: The model that lends configuration and tokenizer.
        models: Every opened model, the donor first.
        out_dtype: The format of all floating-point output, or None to keep the donor's.
        device: Where the merge runs.
        device_name: Its name.
        allow_nonfinite: Whether NaN and infinity may pass.
        notes: What the user should know.
        makes_adapter: Whether the output is an adapter, not a whole model.
        base_name: What people call the base model, or None.
        texts: Further files of the output, by name.
        tied: Names that share another output tensor's numbers.
        stage: What is merged on calibration data before tensors are written, or None.
    """

    recipe: Recipe
    method: Method
    tasks: tuple[Task, ...] = field(repr=False)
    layout: ShardLayout = field(repr=False)
    donor: Source = field(repr=False)
    models: tuple[Source, ...] = field(repr=False)
    out_dtype: Dtype | None
    device: Device = field(repr=False)
    device_name: str
    allow_nonfinite: bool
    notes: tuple[str, ...]
    makes_adapter: bool = False
    base_name: str | None = None
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)
    tied: Mapping[str, str] = field(default_factory=dict, repr=False)
    stage: Stage | None = field(default=None, repr=False)
    finisher: Finisher | None = field(default=None, repr=False)

    @property
    def count(self) -> int:
        """How many tensors it makes."""
        return sum(len(task.outputs) for task in self.tasks)

    @property
    def bytes_to_write(self) -> int:
        """Bytes of the weight files."""
        return self.layout.size

    @property
    def bytes_to_read(self) -> int:
        """Bytes that must be read at least once."""
        return sum(info.nbytes for task in self.tasks for info in task.inputs)

    def on_bits(self, task: MergeTask) -> WeightedSum | None:
        """The weighted sum that a task comes to, where it can be taken of the bits as stored.

        That is worth the import of a compiler in large merges alone.
        """
        plain = (
            isinstance(self.device, Processor)
            and task.output.dtype is Dtype.BF16
            and task.compute == np.float32
            and self.bytes_to_write >= COMPILER_PAYS
            and all(
                expert.info.dtype is Dtype.BF16 and expert.name not in expert.model.computed
                for expert in task.experts
            )
        )
        return task.method.weighted_sum(task.settings) if plain else None

    @property
    def readings(self) -> str:
        """How often a method reads its inputs, in words."""
        return "several times" if self.method.reach is Reach.REDUCTION else "once"

    @property
    def small_files(self) -> int:
        """Bytes to keep free for all else: journal, index, manifest, tokenizer, layers that wait."""
        outputs = [info for task in self.tasks for info in task.outputs]
        texts = sum(map(len, self.texts.values()))
        kept = 0 if self.stage is None else self.stage.bytes_kept
        return (
            2**20 + 1000 * len(outputs) + 4 * sum(len(i.name) for i in outputs) + 4 * texts + kept
        )

    def peak_memory(self, workers: int) -> int:
        """Bytes of arrays in memory at once, beside the interpreter's own.

        Args:
            workers: Threads, each of which has a tensor in hand.
        """
        merges = [task for task in self.tasks if isinstance(task, MergeTask)]
        rows = max((len(task.operands) for task in merges), default=1)
        itemsize = max((task.compute.itemsize for task in merges), default=4)
        # The operands, and what a method holds of one row: sums, masks, the rounded result.
        chunks = (rows + 6) * self.device.chunk_size * itemsize
        histograms = 2 * rows * HISTOGRAM if self.method.reach is Reach.REDUCTION else 0
        if self.method.reach is Reach.MATRIX:
            # Every expert's matrix in float64, its decomposition, and the whitened bases.
            largest = max((task.output.numel for task in merges), default=0)
            chunks += 8 * (3 * rows + 6) * largest
        updates = max(
            (t.merge.peak_memory for t in self.tasks if isinstance(t, UpdateTask | ApplyTask)),
            default=0,
        )
        writing = min(workers, len(self.tasks)) * max(chunks + histograms, updates)
        return writing if self.stage is None else max(writing, self.stage.peak_memory)

    @cached_property
    def digest(self) -> str:
        """Identifies the output: same digest, same bytes. Resuming requires it."""
        content = {
            "recipe": self.recipe.digest(),
            "sources": [
                [str(source.path), source.size, source.modified_ns]
                for model in self.models
                for source in model.sources
            ],
            "tensors": [
                [info.name, info.dtype.value, info.shape]
                for task in self.tasks
                for info in task.outputs
            ],
            "shards": [shard.file for shard in self.layout.shards],
            "device": self.device_name,
            "chunk": self.device.chunk_size,
            "stage": None if self.stage is None else self.stage.digest,
            "finish": None if self.finisher is None else self.finisher.digest,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
