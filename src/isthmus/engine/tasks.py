"""What a merge makes, one piece at a time, and of what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from isthmus.checkpoints import TensorInfo
from isthmus.checkpoints.adapter_format import StoredFactors
from isthmus.engine.module_merge import MergedAdapter, ModuleMerge
from isthmus.engine.streams import Operand
from isthmus.methods.method import Method, Settings


@dataclass(frozen=True, slots=True)
class MergeTask:
    """A tensor to merge.

    Attributes:
        output: Its name, format and shape in the output.
        base: The base model's tensor, or None when the method ignores the base.
        experts: The experts' tensors.
        settings: The method's parameters here.
        compute: float32 or float64.
        method: The merge method.
    """

    output: TensorInfo
    base: Operand | None
    experts: tuple[Operand, ...]
    settings: Settings
    compute: np.dtype[np.floating]
    method: Method

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """What is written."""
        return (self.output,)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Everything that is read, the base last."""
        return self.experts if self.base is None else (*self.experts, self.base)

    @property
    def inputs(self) -> Sequence[TensorInfo]:
        """What is read."""
        return [operand.info for operand in self.operands]


@dataclass(frozen=True, slots=True)
class CarryTask:
    """A tensor to take from the donor.

    Attributes:
        output: Its name, format and shape in the output.
        source: The donor's tensor.
        reason: Why it is not merged.
        others: The same tensor in other models, when it should be equal there.
    """

    output: TensorInfo
    source: Operand
    reason: str
    others: tuple[Operand, ...] = ()

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """What is written."""
        return (self.output,)

    @property
    def inputs(self) -> Sequence[TensorInfo]:
        """What is read."""
        return [operand.info for operand in (self.source, *self.others)]


@dataclass(frozen=True, slots=True)
class UpdateTask:
    """One module's low-rank updates to merge, into the factors of an adapter.

    Attributes:
        merge: The updates and how they are merged.
        stored: What is written.
    """

    merge: ModuleMerge
    stored: StoredFactors

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """A, B, and the bias if there is one."""
        found = (self.stored.a, self.stored.b, self.stored.bias)
        return tuple(info for info in found if info is not None)

    @property
    def inputs(self) -> Sequence[TensorInfo]:
        """What is read."""
        return self.merge.inputs

    @property
    def settings(self) -> Settings:
        """The method's parameters here."""
        return self.merge.settings


@dataclass(frozen=True, slots=True)
class ApplyTask:
    """A tensor of the base model with the merged update of its module added.

    Attributes:
        output: Its name, format and shape in the output.
        source: The sum, computed when it is read.
        merge: The updates and how they are merged.
        adapter: Who merges them.
    """

    output: TensorInfo
    source: Operand
    merge: ModuleMerge
    adapter: MergedAdapter

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """What is written."""
        return (self.output,)

    @property
    def inputs(self) -> Sequence[TensorInfo]:
        """What is read."""
        return [self.source.info, *self.merge.inputs]

    @property
    def settings(self) -> Settings:
        """The method's parameters here."""
        return self.merge.settings


@dataclass(frozen=True, slots=True)
class SolvedTask:
    """A tensor of a linear layer that is merged on calibration data before tensors are written.

    Attributes:
        output: Its name, format and shape in the output.
        source: The merged numbers.
        experts: The experts' tensors, from which it was made.
        settings: The method's parameters here.
        method: The merge method.
    """

    output: TensorInfo
    source: Operand
    experts: tuple[Operand, ...]
    settings: Settings
    method: Method

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """What is written."""
        return (self.output,)

    @property
    def inputs(self) -> Sequence[TensorInfo]:
        """What is read."""
        return [self.source.info, *(operand.info for operand in self.experts)]


Task: TypeAlias = MergeTask | CarryTask | UpdateTask | ApplyTask | SolvedTask
"""One piece of work; its outputs are written together."""


def is_merge(task: Task) -> bool:
    """Whether anything is merged, or a tensor goes from the donor into the output unchanged."""
    return not isinstance(task, CarryTask)
