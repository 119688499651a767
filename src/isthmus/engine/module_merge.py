"""Merging what several adapters do to one module."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from isthmus.checkpoints import Adapter, Dtype, TensorInfo
from isthmus.checkpoints.adapter import LowRankUpdate
from isthmus.checkpoints.adapter_format import ModuleUpdate, StoredFactors, adapter_tensors
from isthmus.engine.remarks import Remarks
from isthmus.errors import MethodError, NonFiniteError
from isthmus.methods.method import Method, Settings
from isthmus.typing import FloatArray

if TYPE_CHECKING:
    from torch import Tensor

_KEPT_MERGES = 8
"""Merged modules in memory; at least one for each worker, so that none is merged twice."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one adapter does to the module."""

    adapter: Adapter
    update: LowRankUpdate

    def factors(self) -> tuple[FloatArray, FloatArray]:
        """A of shape [rank, n], and B of shape [m, rank] times the scaling; float64.

        Raises:
            NonFiniteError: if one holds NaN or infinity.
        """
        a, b = self._read(self.update.a), self._read(self.update.b)
        return a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1) * self.update.scaling

    def bias(self) -> FloatArray | None:
        """The bias of B times the scaling, shape [m], float64, or None.

        Raises:
            NonFiniteError: if it holds NaN or infinity.
        """
        info = self.update.bias
        return None if info is None else self._read(info) * self.update.scaling

    def _read(self, info: TensorInfo) -> FloatArray:
        values = self.adapter.factor(info, np.dtype(np.float64))
        if not np.isfinite(values).all():
            raise NonFiniteError(
                f"{self.adapter.label}: tensor {info.name} holds NaN or infinity",
                "The adapter is broken: its training diverged, most likely. Leave it out.",
            )
        return values


@dataclass(frozen=True, slots=True)
class MergedModule:
    """The result for one module.

    Attributes:
        a: Shape [rank, n], float64.
        b: Shape [m, rank], float64; the update is b @ a.
        bias: Shape [m], float64, or None.
        remarks: What came up.
    """

    a: FloatArray
    b: FloatArray
    bias: FloatArray | None
    remarks: Remarks


@dataclass(frozen=True, slots=True, eq=False)
class ModuleMerge:
    """The updates of one module, and how they are merged.

    Attributes:
        module: Its name in the base model.
        parts: One for each adapter; None where it leaves the module alone.
        method: The merge method.
        settings: Its parameters here.
        space: Where it runs; None for its default.
        rank: Of the result.
        scales: What was found out on calibration data: how each update is scaled, of a shape that
            broadcasts to [K, m, n], or None where it is merged as usual.
    """

    module: str
    parts: tuple[Part | None, ...]
    method: Method
    settings: Settings
    space: str | None
    rank: int
    scales: Callable[[], Tensor | None] | None = None

    @property
    def pattern(self) -> LowRankUpdate:
        """The first adapter's update, whose shapes are those of all."""
        return next(part.update for part in self.parts if part is not None)

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.pattern.shape

    @property
    def has_bias(self) -> bool:
        """Whether an adapter adds to the bias."""
        return any(part is not None and part.update.bias is not None for part in self.parts)

    @property
    def announced(self) -> ModuleUpdate:
        """What the merged adapter says about the module."""
        return ModuleUpdate(
            module=self.module,
            rank=self.rank,
            shape=self.shape,
            kernel=self.pattern.kernel,
            embedding=self.pattern.embedding,
            bias=self.has_bias,
        )

    @property
    def inputs(self) -> Sequence[TensorInfo]:
        """What is read."""
        updates = [part.update for part in self.parts if part is not None]
        found = [info for u in updates for info in (u.a, u.b, u.bias)]
        return [info for info in found if info is not None]

    @property
    def peak_memory(self) -> int:
        """Bytes of arrays in memory at once, roughly."""
        rows, columns = self.shape
        total = sum(part.update.rank for part in self.parts if part is not None)
        # The factors, their joint bases, the decompositions and the result.
        factors = 8 * (rows + columns) * (4 * total + 2 * self.rank)
        space = self.space or self.method.spaces[0]
        if space == "full":
            return factors + 3 * 8 * rows * columns
        coordinates = columns if space == "knots" else total
        return factors + 8 * (len(self.parts) + 4) * total * coordinates

    def run(self) -> MergedModule:
        """Read and merge.

        Raises:
            MethodError: if the method cannot merge these updates.
            NonFiniteError: if a factor holds NaN or infinity.
        """
        import torch

        from isthmus.geometry.factored import Factored
        from isthmus.methods.adapters import add_scaled, merge_updates, merge_vectors

        updates: list[Factored] = []
        biases: list[torch.Tensor | None] = []
        for part in self.parts:
            if part is None:
                updates.append(Factored.zero(*self.shape))
                biases.append(None)
                continue
            a, b = part.factors()
            updates.append(Factored(torch.from_numpy(b), torch.from_numpy(a)))
            own = part.bias()
            biases.append(None if own is None else torch.from_numpy(own))
        try:
            scales = None if self.scales is None else self.scales()
            if scales is not None:
                merged = add_scaled(updates, scales, rank=self.rank)
            else:
                merged = merge_updates(
                    self.method, updates, self.settings, space=self.space, rank=self.rank
                )
            bias = merge_vectors(self.method, biases, self.settings) if self.has_bias else None
        except MethodError as error:
            raise MethodError(f"module {self.module}: {error.problem}", error.cure) from error
        left, right = merged.update
        return MergedModule(
            a=right.numpy(),
            b=left.numpy(),
            bias=None if bias is None else bias.numpy(),
            remarks=Remarks(
                subject=self.module,
                texts=merged.notes,
                energy=float((left.mT @ left @ right @ right.mT).trace()),
                share=merged.kept,
            ),
        )


class MergedAdapter(Adapter):
    """The adapter that a merge makes, computed module by module when it is read.

    Args:
        label: What errors call it.
        donor: The adapter whose configuration it takes over.
        merges: What it consists of.
    """

    def __init__(self, label: str, donor: Adapter, merges: Sequence[ModuleMerge]) -> None:
        self.label = label
        self.path: Path = donor.path
        self.config: Mapping[str, Any] = donor.config
        self.sources = ()
        self.replaced = {}
        stored = adapter_tensors([merge.announced for merge in merges], [], Dtype.F32).factors
        self.updates = {merge.module: _update(merge, stored[merge.module]) for merge in merges}
        self._places = {
            info.name: (module, part)
            for module, factors in stored.items()
            for part, info in (("a", factors.a), ("b", factors.b), ("bias", factors.bias))
            if info is not None
        }
        self._merges = {merge.module: merge for merge in merges}
        self._locks = {merge.module: threading.Lock() for merge in merges}
        self._run = lru_cache(_KEPT_MERGES)(lambda module: self._merges[module].run())

    def merged(self, module: str) -> MergedModule:
        """The result for one module; whoever asks while it is computed waits for it."""
        with self._locks[module]:
            return self._run(module)

    def factor(self, info: TensorInfo, dtype: np.dtype[Any]) -> FloatArray:
        """All of an A, B or bias, in float32 or float64."""
        module, part = self._places[info.name]
        values: FloatArray = getattr(self.merged(module), part)
        return values.astype(dtype).reshape(info.shape)

    def read(self, info: TensorInfo, start: int, out: FloatArray) -> None:
        """Elements `start : start + out.size` of an A, B or bias."""
        out[...] = self.factor(info, out.dtype).reshape(-1)[start : start + out.size]

    def close(self) -> None:
        """The adapters that it reads belong to others."""
        self._run.cache_clear()


def _update(merge: ModuleMerge, stored: StoredFactors) -> LowRankUpdate:
    return LowRankUpdate(
        module=merge.module,
        a=stored.a,
        b=stored.b,
        scaling=1.0,
        embedding=merge.pattern.embedding,
        fan_in_fan_out=merge.pattern.fan_in_fan_out,
        kernel=merge.pattern.kernel,
        bias=stored.bias,
    )
