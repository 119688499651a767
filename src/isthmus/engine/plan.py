"""The plan of a merge: every output tensor, what it is made of, and what it will cost.

A plan is made from headers and configurations alone. What can be known to fail fails here, before
a byte is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from isthmus.checkpoints import (
    Checkpoint,
    Dtype,
    ShardLayout,
    TensorInfo,
    check_sidecars,
    open_checkpoint,
    parse_size,
)
from isthmus.checkpoints.dtypes import RECIPE_DTYPES
from isthmus.checkpoints.vocabulary import differing_tokens
from isthmus.engine.compatibility import require_mergeable
from isthmus.engine.devices import Device, Processor, open_device
from isthmus.engine.matching import Carried, Matched, Matching, match
from isthmus.engine.streams import Operand
from isthmus.errors import MethodError, PlanError
from isthmus.methods.method import BaseUse, Method, Reach, Settings, WeightedSum
from isthmus.methods.registry import get_method
from isthmus.recipes import Depths, Recipe, resolve_settings
from isthmus.recipes.settings import Setting

DEFAULT_SHARD_SIZE = 5_000_000_000
"""Bytes; the Hub's own default."""

HISTOGRAM = 8 * 2**16
"""Bytes of the counts from which a method learns about one row of a tensor."""


COMPILER_PAYS = 1_000_000_000
"""Bytes of weights to write from which loading compiled loops costs less than it saves."""


@dataclass(frozen=True, slots=True)
class MergeTask:
    """A tensor to merge.

    Attributes:
        output: Its name, format and shape in the output.
        base: The base model's tensor, or None when the method ignores the base.
        experts: The experts' tensors.
        settings: The method's parameters here.
        compute: float32 or float64.
    """

    output: TensorInfo
    base: Operand | None
    experts: tuple[Operand, ...]
    settings: Settings
    compute: np.dtype[np.floating]


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
    others: tuple[Operand, ...]


@dataclass(frozen=True)
class Plan:
    """What a merge will do.

    Attributes:
        recipe: The merge as it was asked for.
        method: Its method.
        tasks: One for each output tensor, in the order of the output files.
        layout: Which tensor lies where.
        donor: The model that lends configuration and tokenizer.
        models: Every opened model, the donor first.
        out_dtype: The format of all floating-point output, or None to keep the donor's.
        device: Where the merge runs.
        device_name: Its name.
        allow_nonfinite: Whether NaN and infinity may pass.
        notes: What the user should know.
    """

    recipe: Recipe
    method: Method
    tasks: tuple[MergeTask | CarryTask, ...] = field(repr=False)
    layout: ShardLayout = field(repr=False)
    donor: Checkpoint = field(repr=False)
    models: tuple[Checkpoint, ...] = field(repr=False)
    out_dtype: Dtype | None
    device: Device = field(repr=False)
    device_name: str
    allow_nonfinite: bool
    notes: tuple[str, ...]

    @property
    def bytes_to_write(self) -> int:
        """Bytes of the weight files."""
        return self.layout.size

    @property
    def bytes_to_read(self) -> int:
        """Bytes that must be read at least once."""
        return sum(operand.info.nbytes for task in self.tasks for operand in _operands(task))

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
        return self.method.weighted_sum(task.settings) if plain else None

    @property
    def readings(self) -> str:
        """How often a method reads its inputs, in words."""
        return "once" if self.method.reach is Reach.ELEMENTWISE else "several times"

    @property
    def small_files(self) -> int:
        """Bytes to keep free for all that is not weights: journal, index, manifest, tokenizer."""
        return 2**20 + 1000 * len(self.tasks) + 4 * sum(len(t.output.name) for t in self.tasks)

    def peak_memory(self, workers: int) -> int:
        """Bytes of arrays in memory at once, beside the interpreter's own.

        Args:
            workers: Threads, each of which has a tensor in hand.
        """
        merges = [task for task in self.tasks if isinstance(task, MergeTask)]
        rows = max((len(_operands(task)) for task in merges), default=1)
        itemsize = max((task.compute.itemsize for task in merges), default=4)
        # The operands, and what a method holds of one row: sums, masks, the rounded result.
        chunks = (rows + 6) * self.device.chunk_size * itemsize
        histograms = 2 * rows * HISTOGRAM if self.method.reach is Reach.REDUCTION else 0
        return min(workers, len(self.tasks)) * (chunks + histograms)

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
            "tensors": [[t.output.name, t.output.dtype.value, t.output.shape] for t in self.tasks],
            "shards": [shard.file for shard in self.layout.shards],
            "device": self.device_name,
            "chunk": self.device.chunk_size,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _operands(task: MergeTask | CarryTask) -> tuple[Operand, ...]:
    if isinstance(task, CarryTask):
        return (task.source, *task.others)
    return task.experts if task.base is None else (*task.experts, task.base)


@contextmanager
def planned(
    recipe: Recipe,
    *,
    device: str = "cpu",
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    allow_nonfinite: bool = False,
) -> Iterator[Plan]:
    """Open the models of a recipe and plan the merge; the models close at the end.

    Args:
        recipe: What to merge.
        device: `cpu`, or a torch device.
        max_shard_size: Bytes of the largest weight file, or text such as `5GB`.
        allow_nonfinite: Let NaN and infinity pass.

    Raises:
        CheckpointError: if a model cannot be opened.
        PlanError: if the models cannot be merged as asked.
    """
    with ExitStack() as stack:
        opened: dict[str, Checkpoint] = {}
        for reference in recipe.references:
            opened[reference] = stack.enter_context(open_checkpoint(reference, root=recipe.root))
        yield make_plan(
            recipe,
            opened,
            device=device,
            max_shard_size=parse_size(max_shard_size),
            allow_nonfinite=allow_nonfinite,
        )


def make_plan(
    recipe: Recipe,
    opened: Mapping[str, Checkpoint],
    *,
    device: str,
    max_shard_size: int,
    allow_nonfinite: bool,
) -> Plan:
    """Plan a merge of opened models; see `planned`.

    Args:
        recipe: What to merge.
        opened: The recipe's models by the names that it uses.
        device: `cpu`, or a torch device.
        max_shard_size: Bytes of the largest weight file.
        allow_nonfinite: Let NaN and infinity pass.

    Raises:
        PlanError: if the models cannot be merged as asked.
    """
    method = get_method(recipe.merge_method)
    donor = opened[recipe.donor]
    experts = [opened[entry.model] for entry in recipe.experts]
    base = donor if method.base is BaseUse.REQUIRED else None
    # The donor first, then the experts; the donor is the base, or the first expert.
    matching = match([donor, *experts])
    # What would be found out when everything is computed is better found out now.
    check_sidecars(donor)
    if recipe.tensors == "strict":
        require_mergeable(matching, donor.label)
    out_dtype = _out_dtype(recipe)
    depths = Depths(donor.tensors)

    def merge_task(matched: Matched) -> MergeTask:
        operands = tuple(map(Operand, experts, matched.names[1:]))
        of_base = None if base is None else Operand(base, matched.names[0])
        try:
            settings = resolve_settings(recipe, method, matched.info.name, depths)
            method.check(settings)
        except MethodError as error:
            raise PlanError(f"tensor {matched.info.name}: {error.problem}", error.cure) from error
        return MergeTask(
            output=_converted(matched.info, out_dtype),
            base=of_base,
            experts=operands,
            settings=settings,
            compute=_compute_dtype(recipe, operands, of_base),
        )

    def carry_task(carried: Carried) -> CarryTask:
        return CarryTask(
            output=_converted(carried.info, out_dtype),
            source=Operand(donor, carried.info.name),
            reason=carried.reason.value,
            others=()
            if carried.info.dtype.is_float
            else tuple(Operand(experts[i - 1], name) for i, name in carried.others.items()),
        )

    merges = {matched.info.name: merge_task(matched) for matched in matching.matched}
    carries = {carried.info.name: carry_task(carried) for carried in matching.carried}
    if not merges:
        raise PlanError(
            f"{donor.label} shares no tensor with all the other models",
            "Check that they have the same architecture: isthmus inspect A B compares them.",
        )
    tasks: dict[str, MergeTask | CarryTask] = {**merges, **carries}
    ordered = tuple(tasks[name] for name in donor.tensors)
    return Plan(
        recipe=recipe,
        method=method,
        tasks=ordered,
        layout=ShardLayout.plan(
            [task.output for task in ordered], max_shard_size, tied=donor.tied_by_file
        ),
        donor=donor,
        models=tuple(opened.values()),
        out_dtype=out_dtype,
        device=open_device(device),
        device_name=device,
        allow_nonfinite=allow_nonfinite,
        notes=tuple(_notes(recipe, tuple(opened.values()), matching)),
    )


def _out_dtype(recipe: Recipe) -> Dtype | None:
    name = recipe.output_dtype
    return None if name is None else RECIPE_DTYPES[name]


def _converted(info: TensorInfo, dtype: Dtype | None) -> TensorInfo:
    return (
        info
        if dtype is None or not info.dtype.is_float
        else TensorInfo(info.name, dtype, info.shape)
    )


def _compute_dtype(
    recipe: Recipe, experts: Sequence[Operand], base: Operand | None
) -> np.dtype[np.floating]:
    """float32, or float64 as soon as an input or the recipe is float64."""
    asked = recipe.dtype is not None and RECIPE_DTYPES[recipe.dtype] is Dtype.F64
    operands = [*experts] if base is None else [*experts, base]
    stored = any(operand.info.dtype is Dtype.F64 for operand in operands)
    return np.dtype(np.float64) if asked or stored else np.dtype(np.float32)


def _notes(recipe: Recipe, models: Sequence[Checkpoint], matching: Matching) -> Iterator[str]:
    yield from recipe.notes
    for model in models:
        yield from (f"{model.label}: {note}" for note in model.notes)
    for parameter in recipe.method.parameters:
        if parameter.ignored and any(parameter.name in group for group in _settings(recipe)):
            yield f"{parameter.name} has no effect in {recipe.merge_method}, as in mergekit"
    donor, *others = models
    for text in _unused_filters(recipe, donor.tensors):
        yield f"no tensor's name contains the filter {text!r}, so it has no effect"
    for other in others:
        if recipe.base_model is not None and donor.sources and _files(other) == _files(donor):
            yield (
                f"{other.label} is the base model under another name: its task vector is zero. "
                "Name it as base_model does, and it is not counted among the experts."
            )
        count = differing_tokens(donor, other)
        if count:
            yield (
                f"{count:,} tokens have other ids in {other.label} than in {donor.label}: "
                "the rows of merged embeddings mix unrelated tokens"
            )
    reasons: dict[str, list[str]] = {}
    for carried in matching.carried:
        reasons.setdefault(carried.reason.value, []).append(carried.info.name)
    for reason, names in reasons.items():
        yield f"copied from {donor.label}, {reason}: {_some(names)}"
    for label, dropped in matching.dropped.items():
        yield f"{label}: not in {donor.label}, left out: {_some(dropped)}"
    if donor.config is not None and "model_type" not in donor.config:
        yield (
            f"the config.json of {donor.label} has no model_type: load the output with its own "
            "class in transformers, AutoModel will not know it"
        )
    if recipe.output_dtype is not None and recipe.output_dtype.startswith("float8"):
        yield (
            "float8 without scales is read by safetensors and torch; transformers' "
            "from_pretrained does not load it"
        )


def _settings(recipe: Recipe) -> list[Mapping[str, Setting]]:
    return [recipe.parameters, *(entry.parameters for entry in recipe.models)]


def _files(model: Checkpoint) -> list[Path]:
    return [source.path.resolve() for source in model.sources]


def _unused_filters(recipe: Recipe, names: Iterable[str]) -> list[str]:
    """Filters that let no tensor through: misspelt, most likely."""
    filters = {
        rule.filter: None
        for parameters in _settings(recipe)
        for setting in parameters.values()
        for rule in setting.rules
        if rule.filter is not None
    }
    return [text for text in filters if not any(text in name for name in names)]


def _some(names: Sequence[str], count: int = 4) -> str:
    shown = ", ".join(names[:count])
    return shown if len(names) <= count else f"{shown} and {len(names) - count} more"
