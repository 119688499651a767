"""A base model with a LoRA adapter on it, added while reading and never as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from isthmus.checkpoints.adapter import Adapter, LowRankUpdate
from isthmus.checkpoints.base import Checkpoint, TensorInfo
from isthmus.checkpoints.dtypes import Dtype, copied, encode
from isthmus.checkpoints.names import align_names
from isthmus.checkpoints.tensor_file import check_range
from isthmus.checkpoints.ties import config_ties, input_embedding, is_output_embedding
from isthmus.errors import CheckpointError
from isthmus.typing import FloatArray, StorageArray

# The product of the factors is formed in blocks of rows of about this many elements. Blocks begin
# at fixed rows, so that an element does not depend on the range in which it was read.
_BLOCK_ELEMENTS = 1 << 17

# Ready factors of so many modules are kept: those that the threads are busy with.
_KEPT_FACTORS = 8


@dataclass(frozen=True, slots=True)
class _Placed:
    """An update and how it lies on the base's weight."""

    update: LowRankUpdate
    transposed: bool


class AdaptedCheckpoint(Checkpoint):
    """The checkpoint `base + scaling * B @ A`, and with it what the adapter stores in full.

    Both are closed with it.

    Args:
        base: The model that the adapter was trained on.
        adapter: The adapter.
        label: What errors call the two together.

    Raises:
        CheckpointError: if the base lacks a module that the adapter changes, the shapes differ,
            or the adapter treats tied embeddings apart from each other.
    """

    def __init__(self, base: Checkpoint, adapter: Adapter, *, label: str | None = None) -> None:
        self.label = label or f"{base.label}+{adapter.label}"
        self.path = base.path
        self.config = base.config
        self.sources = (*base.sources, *adapter.sources)
        self.tied = base.tied
        self.tied_by_file = base.tied_by_file
        self._base = base
        self._adapter = adapter
        weights = {f"{module}.weight": update for module, update in adapter.updates.items()}
        names = align_names([*weights, *adapter.replaced], [*base.tensors, *base.tied])
        self._replaced = self._place_replaced(names)
        self._updates: dict[str, _Placed] = {}
        self.tensors: Mapping[str, TensorInfo] = {
            **base.tensors,
            **{name: TensorInfo(name, s.dtype, s.shape) for name, s in self._replaced.items()},
        }
        for name, update in weights.items():
            self._place_update(names.get(name, name), update)
        self.computed = self._updates.keys()
        added = [name for name in self._replaced if name not in base.tensors]
        self.notes = base.notes + tuple(
            f"{name} comes from the adapter {adapter.label}; its base has no such tensor."
            for name in added
        )
        self._factors = lru_cache(_KEPT_FACTORS)(self._load_factors)

    def read(self, name: str, start: int, out: FloatArray) -> None:
        """Decode a range of the adapted weight, without rounding it to the base's format."""
        check_range(self.tensors[name], start, start + out.size)
        if name in self._replaced:
            self._adapter.read(self._replaced[name], start, out)
        else:
            self._base.read(name, start, out)
        if name in self._updates and out.size:
            self._add_update(name, start, out)

    def read_stored(
        self, name: str, start: int, stop: int, out: StorageArray | None = None
    ) -> StorageArray:
        """A range of the weight; where the adapter changes it, rounded to its own format."""
        if name not in self._updates and name not in self._replaced:
            return self._base.read_stored(name, start, stop, out)
        dtype = self.tensors[name].dtype
        size = stop - start
        values: FloatArray = (
            np.empty(size, np.float64) if dtype is Dtype.F64 else np.empty(size, np.float32)
        )
        self.read(name, start, values)
        stored = encode(values, dtype)
        return stored if out is None else copied(stored, out)

    def close(self) -> None:
        """Release the files of both. Closing twice is allowed."""
        self._factors.cache_clear()
        self._adapter.close()
        self._base.close()

    def _add_update(self, name: str, start: int, out: FloatArray) -> None:
        left, right = self._factors(name, out.dtype)
        rows, columns = left.shape[0], right.shape[1]
        height = max(1, _BLOCK_ELEMENTS // columns)
        stop = start + out.size
        block = np.empty((min(height, rows), columns), out.dtype)
        first = start // columns // height * height
        for row in range(first, -(-stop // columns), height):
            product = block[: min(height, rows - row)]
            np.matmul(left[row : row + height], right, out=product)
            begin = max(start, row * columns)
            end = min(stop, row * columns + product.size)
            touched = product.reshape(-1)[begin - row * columns : end - row * columns]
            out[begin - start : end - start] += touched

    def _load_factors(self, name: str, dtype: np.dtype[Any]) -> tuple[FloatArray, FloatArray]:
        """The factors whose product, rows first, is added to the weight; scaled already."""
        placed = self._updates[name]
        a = self._adapter.factor(placed.update.a, dtype)
        b = self._adapter.factor(placed.update.b, dtype)
        b *= placed.update.scaling
        if placed.transposed:
            a, b = b.T.copy(), a.T.copy()
        return b, a

    def _place_update(self, name: str, update: LowRankUpdate) -> None:
        who = f"{self._adapter.label} changes {update.module}"
        if name in self.tied:
            raise CheckpointError(
                f"{who}, which {self._base.label} ties to {self.tied[name]}",
                "Adding it to one of the two would change both. Untie them in the base first: "
                "set tie_word_embeddings to false and store both.",
            )
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"{who}, but {self._base.label} has no tensor {name!r}",
                "The adapter was trained on another model; see base_model_name_or_path in its "
                "adapter_config.json.",
            )
        outputs, inputs = update.shape
        # The flag covers a whole adapter, though a model can mix both kinds of layer: the shape
        # decides, and the flag only where the weight is square.
        fits = [
            transposed
            for transposed in (update.fan_in_fan_out or update.embedding, False, True)
            if info.shape == ((inputs, outputs) if transposed else (outputs, inputs))
            and (transposed or not update.embedding)
        ]
        if not fits or not info.dtype.is_float:
            raise CheckpointError(
                f"{who} by a matrix of shape {[outputs, inputs]}, but {name!r} is "
                f"{list(info.shape)} in {info.dtype.value} in {self._base.label}",
                "The adapter was trained on another model.",
            )
        self._updates[name] = _Placed(update, fits[0])

    def _place_replaced(self, names: Mapping[str, str]) -> dict[str, TensorInfo]:
        """The full tensors of the adapter by the base's names; those of tied names left out."""
        base = self._base
        placed = {names.get(name, name): info for name, info in self._adapter.replaced.items()}
        ties = dict(base.tied)
        embedding = input_embedding(base.tensors) if config_ties(base.config) else None
        if embedding is not None:
            ties |= {name: embedding for name in placed if is_output_embedding(name)}
        for name, kept in ties.items():
            ours, theirs = placed.pop(name, None), placed.get(kept)
            together = bool(self._adapter.config.get("ensure_weight_tying"))
            if ours is None and (theirs is None or together):
                continue
            if ours is None or theirs is None or not self._equal(ours, theirs):
                raise CheckpointError(
                    f"{self._adapter.label} stores {name if theirs is None else kept} by itself, "
                    f"but {base.label} ties {name} to {kept}",
                    "Untie them in the base first: set tie_word_embeddings to false and store "
                    "both.",
                )
        return placed

    def _equal(self, one: TensorInfo, other: TensorInfo) -> bool:
        if one.shape != other.shape:
            return False
        step = 1 << 20
        ours, theirs = np.empty(step, np.float64), np.empty(step, np.float64)
        for start in range(0, one.numel, step):
            size = min(step, one.numel - start)
            self._adapter.read(one, start, ours[:size])
            self._adapter.read(other, start, theirs[:size])
            if not np.array_equal(ours[:size], theirs[:size]):
                return False
        return True
