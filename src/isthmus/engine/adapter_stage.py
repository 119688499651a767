"""Calibration data and adapters: the network is run with each adapter on the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from isthmus.checkpoints import AdaptedCheckpoint, Adapter, Checkpoint
from isthmus.engine.plan_models import checked_settings
from isthmus.engine.plan_stage import plan_stage
from isthmus.engine.stage import Stage
from isthmus.engine.streams import Operand
from isthmus.engine.tasks import MergeTask
from isthmus.recipes import Depths, Recipe


@dataclass(frozen=True, slots=True)
class AdapterStage:
    """What data will say about the modules of a merge of adapters.

    Attributes:
        stage: What finds it out, on the base with each adapter.
        weights: The base's tensor for every module that an adapter changes, by its name in the output.
    """

    stage: Stage
    weights: Mapping[str, str]


def plan_adapter_stage(
    recipe: Recipe,
    base: Checkpoint,
    adapters: Sequence[Adapter],
    module_names: Sequence[Mapping[str, str]],
) -> AdapterStage:
    """Plan what is merged on calibration data.

    Args:
        recipe: For a method that looks at data.
        base: The model that the adapters were trained on.
        adapters: They stay the caller's, as the base does.
        module_names: For each adapter the modules that it changes, by their names in the output.

    Raises:
        CalibrationError: if the network cannot be built, or the data cannot be used.
        CheckpointError: if the base lacks a module.
        PlanError: if the settings leave the span of the adapters, or exclude each other.
    """
    adapted = [AdaptedCheckpoint(base, adapter) for adapter in adapters]
    updated = {name for one in adapted for name in one.modules}
    changed = updated.union(*(one.replaced for one in adapted))
    depths = Depths(base.tensors)
    merges = {
        name: MergeTask(
            output=info,
            base=Operand(base, name),
            experts=tuple(Operand(one, name) for one in adapted),
            settings=checked_settings(recipe, recipe.method, name, depths),
            compute=np.dtype(np.float32),
            method=recipe.method,
        )
        for name, info in base.tensors.items()
        if name in changed
    }
    weights: dict[str, str] = {}
    for one, names in zip(adapted, module_names, strict=True):
        tensor_of = {of: tensor for tensor, of in one.modules.items() if tensor.endswith(".weight")}
        weights |= {name: tensor_of[own] for name, own in names.items() if own in tensor_of}
    return AdapterStage(plan_stage(recipe, base, adapted, merges, updated=updated), weights)
