"""A base model with a LoRA adapter on it, added while reading and never as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np

from isthmus.checkpoints.adapter import Adapter, LowRankUpdate
from isthmus.checkpoints.base import Checkpoint, TensorInfo
from isthmus.checkpoints.loaded_model import (
    NAMELESS_OUTPUT,
    LoadedModel,
    loaded_model,
    unstored_ties,
)
from isthmus.checkpoints.names import align_names
from isthmus.checkpoints.orientation import Orientations
from isthmus.checkpoints.tensor_file import check_range
from isthmus.checkpoints.ties import config_ties, input_embedding, is_output_embedding
from isthmus.errors import CheckpointError
from isthmus.typing import FloatArray, StorageArray

_T = TypeVar("_T")

# The product of the factors is formed in blocks of rows of about this many elements. Blocks begin
# at fixed rows, so that an element does not depend on the range in which it was read.
_BLOCK_ELEMENTS = 1 << 17

# Ready factors of so many modules are kept: those that the threads are busy with.
_KEPT_FACTORS = 8

# Two updates are the same if they differ by no more than this share of their norm: each may have
# been rounded on its own.
_SAME = 1e-5


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

    Attributes:
        modules: For each tensor of the base that changes, the module to whose update that is due.
        replaced: The tensors that the adapter stores in full.

    Raises:
        CheckpointError: if the base lacks a module or a bias that the adapter changes, the shapes
            differ, or the adapter treats tied embeddings apart from each other.
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
        biases = {
            f"{module}.bias": update
            for module, update in adapter.updates.items()
            if update.bias is not None
        }
        names = self._base_names([*weights, *biases], adapter.replaced)
        updates = {names.get(name, name): update for name, update in weights.items()}
        self._replaced = {names.get(name, name): info for name, info in adapter.replaced.items()}
        self.replaced = self._replaced.keys()
        self._join_ties(updates, self._replaced)
        self._orientations = Orientations(base.tensors)
        self._updates: dict[str, _Placed] = {}
        self._biases: dict[str, LowRankUpdate] = {}
        self.tensors: Mapping[str, TensorInfo] = {
            **base.tensors,
            **{name: TensorInfo(name, s.dtype, s.shape) for name, s in self._replaced.items()},
        }
        for name, update in updates.items():
            self._place_update(name, update)
        for name, update in biases.items():
            self._place_bias(names.get(name, name), update)
        self.modules = {
            **{name: placed.update.module for name, placed in self._updates.items()},
            **{name: update.module for name, update in self._biases.items()},
        }
        self.computed = self.modules.keys()
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
        elif name in self._biases:
            self._add_bias(self._biases[name], start, out)

    def read_stored(
        self, name: str, start: int, stop: int, out: StorageArray | None = None
    ) -> StorageArray:
        """A range of the weight; where the adapter changes it, rounded to its own format."""
        if name not in self.computed and name not in self._replaced:
            return self._base.read_stored(name, start, stop, out)
        return self._read_rounded(name, start, stop, out)

    def close(self) -> None:
        """Release the files of both. Closing twice is allowed."""
        self._factors.cache_clear()
        self._adapter.close()
        self._base.close()

    def _base_names(self, added: Iterable[str], replaced: Iterable[str]) -> dict[str, str]:
        """The base's stored names for the adapter's, of those tensors that the base has."""
        base, wanted = self._base, [*added, *replaced]
        names = align_names(wanted, [*base.tensors, *base.tied])
        if any(name not in names for name in added):
            # PEFT names modules as they are in memory.
            loaded = self._loaded
            stored = {} if loaded is None else {there: name for name, there in loaded.names.items()}
            rest = align_names([name for name in wanted if name not in names], stored)
            names |= {name: stored[there] for name, there in rest.items()}
        return names

    @cached_property
    def _loaded(self) -> LoadedModel | None:
        return loaded_model(self._base.config, self._base.tensors)

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

    def _add_bias(self, update: LowRankUpdate, start: int, out: FloatArray) -> None:
        assert update.bias is not None
        added = np.empty_like(out)
        self._adapter.read(update.bias, start, added)
        added *= update.scaling
        out += added

    def _load_factors(self, name: str, dtype: np.dtype[Any]) -> tuple[FloatArray, FloatArray]:
        """The factors whose product, rows first, is added to the weight; scaled already."""
        placed = self._updates[name]
        return self._scaled(placed.update, placed.transposed, dtype)

    def _scaled(
        self, update: LowRankUpdate, transposed: bool, dtype: np.dtype[Any]
    ) -> tuple[FloatArray, FloatArray]:
        a = self._adapter.factor(update.a, dtype)
        b = self._adapter.factor(update.b, dtype)
        a, b = a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)
        b *= update.scaling
        return (a.T.copy(), b.T.copy()) if transposed else (b, a)

    def _place_update(self, name: str, update: LowRankUpdate) -> None:
        who = f"{self._adapter.label} changes {update.module}"
        info = self._target(name, who)
        outputs, inputs = update.shape
        fits = [
            transposed
            for transposed in self._orders(name, update)
            if info.shape == _weight_shape(update, transposed)
        ]
        if not fits or not info.dtype.is_float:
            what = (
                f"a matrix of shape {[outputs, inputs]}"
                if update.kernel is None
                else f"a kernel of shape {list(_weight_shape(update, transposed=False))}"
            )
            raise CheckpointError(
                f"{who} by {what}, but {name!r} is "
                f"{list(info.shape)} in {info.dtype.value} in {self._base.label}",
                "The adapter was trained on another model.",
            )
        self._updates[name] = _Placed(update, fits[0])

    def _place_bias(self, name: str, update: LowRankUpdate) -> None:
        who = f"{self._adapter.label} changes the bias of {update.module}"
        info = self._target(name, who)
        if info.shape != update.shape[:1] or not info.dtype.is_float:
            raise CheckpointError(
                f"{who} by a vector of {update.shape[0]} numbers, but {name!r} is "
                f"{list(info.shape)} in {info.dtype.value} in {self._base.label}",
                "The adapter was trained on another model.",
            )
        self._biases[name] = update

    def _target(self, name: str, who: str) -> TensorInfo:
        """The tensor to which something is added."""
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
        return info

    def _orders(self, name: str, update: LowRankUpdate) -> list[bool]:
        """Whether the product is transposed on the weight: what is possible, the likelier first."""
        if update.embedding:
            return [True]
        if update.kernel is not None:
            return [False]
        # The flag covers a whole adapter, though a model can mix both kinds of layer: the shape
        # decides; where the weight is square, the rest of the model; and the flag only where that
        # is silent.
        known = self._orientations.inputs_first(name.removesuffix(".weight"))
        first = update.fan_in_fan_out if known is None else known
        return [first, not first]

    def _join_ties(
        self, updates: dict[str, LowRankUpdate], replaced: dict[str, TensorInfo]
    ) -> None:
        """Leave tied names out, for what is done to the tensors that they share is done to them."""
        for name, kept in self._ties(updates, replaced).items():
            tie = name, kept
            self._require_alike(tie, updates.pop(name, None), updates.get(kept), self._same_update)
            self._require_alike(tie, replaced.pop(name, None), replaced.get(kept), self._equal)

    def _ties(
        self, updates: Mapping[str, LowRankUpdate], replaced: Collection[str]
    ) -> Mapping[str, str]:
        """The base's tied names, with those that are in no file if the adapter may touch them."""
        base, changed = self._base, {*updates, *replaced}
        ties = dict(base.tied)
        if not any(update.embedding for update in updates.values()) and not any(
            input_embedding([name]) or is_output_embedding(name) for name in changed
        ):
            return ties
        embedding = input_embedding(base.tensors) if config_ties(base.config) else None
        if embedding is not None:
            ties |= {
                name: embedding
                for name in changed
                if is_output_embedding(name) and name not in base.tensors
            }
        unstored = dict(unstored_ties(base.config, base.tensors, self._loaded))
        if any(is_output_embedding(name) for name in ties):
            unstored.pop(NAMELESS_OUTPUT, None)
        return unstored | ties

    def _require_alike(
        self,
        tie: tuple[str, str],
        ours: _T | None,
        theirs: _T | None,
        same: Callable[[_T, _T], bool],
    ) -> None:
        """Refuse what would change one of two tied tensors, or the two in different ways."""
        name, kept = tie
        if ours is None and (theirs is None or self._adapter.config.get("ensure_weight_tying")):
            return
        if ours is not None and theirs is not None:
            if same(ours, theirs):
                return
            what = f"changes {name} and {kept} in different ways"
        else:
            changed, other = (kept, name) if ours is None else (name, kept)
            what = f"changes {changed} but not {other}"
        raise CheckpointError(
            f"{self._adapter.label} {what}, and {self._base.label} ties {name} to {kept}",
            "Untie them in the base first: set tie_word_embeddings to false and store both.",
        )

    def _same_update(self, one: LowRankUpdate, other: LowRankUpdate) -> bool:
        dtype = np.dtype(np.float64)
        left, right = self._scaled(one, one.embedding, dtype)
        others = self._scaled(other, other.embedding, dtype)
        if (left.shape[0], right.shape[1]) != (others[0].shape[0], others[1].shape[1]):
            return False
        # The norm of [left, -left'] [right; right'] is that of the triangles' product.
        columns = np.asarray(np.linalg.qr(np.hstack([left, -others[0]]), mode="r"))
        rows = np.asarray(np.linalg.qr(np.hstack([right.T, others[1].T]), mode="r"))
        rank = one.rank
        size = np.linalg.norm(columns[:, :rank] @ rows[:, :rank].T)
        return bool(np.linalg.norm(columns @ rows.T) <= _SAME * size)

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


def _weight_shape(update: LowRankUpdate, transposed: bool) -> tuple[int, ...]:
    outputs, inputs = update.shape
    if update.kernel is not None:
        return outputs, inputs // math.prod(update.kernel), *update.kernel
    return (inputs, outputs) if transposed else (outputs, inputs)
