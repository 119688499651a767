"""Planning a merge of whole models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from isthmus.checkpoints import (
    MODEL_CONFIG,
    Checkpoint,
    Dtype,
    ShardLayout,
    TensorInfo,
    check_sidecars,
    config_text,
)
from isthmus.checkpoints.dtypes import RECIPE_DTYPES
from isthmus.checkpoints.vocabulary import differing_tokens
from isthmus.engine.compatibility import require_mergeable
from isthmus.engine.devices import open_device
from isthmus.engine.finishing import plan_finish
from isthmus.engine.matching import Carried, Matched, Matching, match
from isthmus.engine.plan import Plan
from isthmus.engine.plan_stage import plan_stage
from isthmus.engine.streams import Operand
from isthmus.engine.tasks import CarryTask, MergeTask, SolvedTask, Task
from isthmus.errors import MethodError, PlanError
from isthmus.methods.method import BaseUse, Method, Settings
from isthmus.methods.registry import get_method
from isthmus.recipes import Depths, Recipe, resolve_settings
from isthmus.recipes.settings import Setting


def plan_models(
    recipe: Recipe,
    opened: Mapping[str, Checkpoint],
    *,
    device: str,
    max_shard_size: int,
    allow_nonfinite: bool,
) -> Plan:
    """Plan a merge of opened models; see `planned.planned`.

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
    asked = out_dtype(recipe)
    depths = Depths(donor.tensors)

    def merge_task(matched: Matched) -> MergeTask:
        operands = tuple(map(Operand, experts, matched.names[1:]))
        of_base = None if base is None else Operand(base, matched.names[0])
        return MergeTask(
            output=converted(matched.info, asked),
            base=of_base,
            experts=operands,
            settings=checked_settings(recipe, method, matched.info.name, depths),
            compute=compute_dtype(recipe, operands, of_base),
            method=method,
        )

    def carry_task(carried: Carried) -> CarryTask:
        return CarryTask(
            output=converted(carried.info, asked),
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
    stage = plan_stage(recipe, donor, experts, merges) if method.calibrated else None
    tasks: dict[str, Task] = {
        **merges,
        **carries,
        **({} if stage is None else {n: _solved(merges[n], stage.view) for n in stage.tensors}),
    }
    ordered = tuple(tasks[name] for name in donor.tensors)
    return Plan(
        recipe=recipe,
        method=method,
        tasks=ordered,
        layout=ShardLayout.plan(
            [info for task in ordered for info in task.outputs],
            max_shard_size,
            tied=donor.tied_by_file,
        ),
        donor=donor,
        models=tuple(opened.values()),
        out_dtype=asked,
        device=open_device(device),
        device_name=device,
        allow_nonfinite=allow_nonfinite,
        notes=tuple(_notes(recipe, tuple(opened.values()), matching)),
        base_name=recipe.base_model,
        tied=donor.tied,
        stage=stage,
        texts=_configuration(donor, asked),
        finisher=plan_finish(recipe, donor, experts),
    )


def _configuration(donor: Checkpoint, asked: Dtype | None) -> dict[str, str]:
    """The config.json of a model that is not written as it is."""
    if not donor.rewritten or donor.config is None:
        return {}
    return {MODEL_CONFIG: config_text(donor.config, asked).decode("utf-8")}


def _solved(task: MergeTask, view: Checkpoint) -> SolvedTask:
    """The same tensor, from where the merged layers are."""
    return SolvedTask(
        task.output, Operand(view, task.output.name), task.experts, task.settings, task.method
    )


def checked_settings(recipe: Recipe, method: Method, name: str, depths: Depths) -> Settings:
    """The method's parameters at one tensor.

    Raises:
        PlanError: if they admit no merge.
    """
    try:
        settings = resolve_settings(recipe, method, name, depths)
        method.check(settings)
    except MethodError as error:
        raise PlanError(f"tensor {name}: {error.problem}", error.cure) from error
    return settings


def out_dtype(recipe: Recipe) -> Dtype | None:
    """The number format of floating-point output; None keeps the donor's."""
    name = recipe.output_dtype
    return None if name is None else RECIPE_DTYPES[name]


def converted(info: TensorInfo, dtype: Dtype | None) -> TensorInfo:
    """The tensor as it is written in `dtype`, if that is given and it holds real numbers."""
    return (
        info
        if dtype is None or not info.dtype.is_float
        else TensorInfo(info.name, dtype, info.shape)
    )


def compute_dtype(
    recipe: Recipe, experts: Sequence[Operand], base: Operand | None
) -> np.dtype[np.floating]:
    """float32, or float64 as soon as an input or the recipe is float64."""
    asked = recipe.dtype is not None and RECIPE_DTYPES[recipe.dtype] is Dtype.F64
    operands = [*experts] if base is None else [*experts, base]
    stored = any(operand.info.dtype is Dtype.F64 for operand in operands)
    return np.dtype(np.float64) if asked or stored else np.dtype(np.float32)


def _notes(recipe: Recipe, models: Sequence[Checkpoint], matching: Matching) -> Iterator[str]:
    yield from recipe.notes
    if recipe.stays is not None:
        moved = [entry.model for entry in recipe.models if entry.model != recipe.stays]
        yield f"moved next to {recipe.stays} before the merge: {', '.join(moved)}"
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
