"""Merging state dicts in memory: the same plan, streams and workers, without files."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from isthmus.checkpoints.memory import MemoryCheckpoint, StateDictSink
from isthmus.engine.plan import DEFAULT_SHARD_SIZE
from isthmus.engine.plan_models import plan_models
from isthmus.engine.progress import Silent
from isthmus.engine.streams import Buffers
from isthmus.engine.worker import Worker
from isthmus.errors import MethodError
from isthmus.methods.registry import get_method
from isthmus.recipes import load_recipe

if TYPE_CHECKING:
    import torch

BASE = "base"
"""The base model's name in errors."""


def merge_state_dicts(
    models: Mapping[str, Mapping[str, torch.Tensor]],
    *,
    base: Mapping[str, torch.Tensor] | None = None,
    method: str = "linear",
    dtype: str | None = None,
    seed: int = 0,
    tensors: Literal["strict", "common"] = "strict",
    device: str = "cpu",
    allow_nonfinite: bool = False,
    **parameters: Any,
) -> dict[str, torch.Tensor]:
    """Merge state dicts in memory, to the same numbers that files would give.

    Args:
        models: The experts' state dicts by name. Names appear in errors, and random methods draw
            by them.
        base: The base model's state dict, for methods that need one.
        method: A name of `isthmus methods`.
        dtype: Number format of the output; by default each tensor keeps the base's, or without
            a base the first model's.
        seed: Of random methods.
        tensors: `strict`: every model has the same tensors; `common`: merge what all have with
            the same shape and take the rest from the base or the first model.
        device: `cpu`, or a torch device; each tensor passes through it in chunks.
        allow_nonfinite: Let NaN and infinity pass.
        **parameters: The method's parameters, as in a recipe: a number, a gradient over the
            layers, or a list of filters. A mapping from model names gives each model its own.
            The weight of every model is 1 unless given. Python cannot write `lambda=0.5`: pass
            `**{"lambda": 0.5}`.

    Returns:
        A new state dict on the processor; nothing in it shares memory with the inputs. Tied
        names stay tied.

    Raises:
        RecipeError: if the method does not exist or a parameter is wrong.
        PlanError: if the models do not have the same tensors.
        NonFiniteError: if an input holds NaN or infinity and may not.

    Example:
        >>> import torch
        >>> one, two = {"w": torch.ones(2)}, {"w": torch.zeros(2)}
        >>> merge_state_dicts({"one": one, "two": two}, method="linear")["w"]
        tensor([0.5000, 0.5000])
    """
    if base is not None and BASE in models:
        raise MethodError(
            f"a model is named {BASE!r}, which is the base model's name here", "Rename the model."
        )
    if get_method(method).calibrated:
        raise MethodError(
            f"{method} runs networks on data, which state dicts alone do not make",
            "Save the models with save_pretrained and merge the folders.",
        )
    own, common = _by_model(models, parameters)
    if any(parameter.name == "weight" for parameter in get_method(method).parameters):
        common = {"weight": 1.0} | common if "weight" not in parameters else common
    recipe = load_recipe(
        {
            "merge_method": method,
            "models": [{"model": name, "parameters": own[name]} for name in models],
            "parameters": common,
            "seed": seed,
            "tensors": tensors,
        }
        | ({} if base is None else {"base_model": BASE})
        | ({} if dtype is None else {"dtype": dtype})
    )
    opened = {name: MemoryCheckpoint(name, state) for name, state in models.items()}
    if base is not None:
        opened[BASE] = MemoryCheckpoint(BASE, base)
    plan = plan_models(
        recipe,
        {name: opened[name] for name in recipe.references},
        device=device,
        max_shard_size=DEFAULT_SHARD_SIZE,
        allow_nonfinite=allow_nonfinite,
    )
    sink = StateDictSink([info for task in plan.tasks for info in task.outputs])
    worker = Worker(plan, Silent(), threading.Event(), Buffers())
    for task in plan.tasks:
        worker.make(task, sink)
    return sink.state_dict(plan.tied)


def _by_model(
    models: Mapping[str, Any], parameters: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Split the parameters into those of single models and those of all."""
    own: dict[str, dict[str, Any]] = {name: {} for name in models}
    common: dict[str, Any] = {}
    for parameter, value in parameters.items():
        if not isinstance(value, Mapping) or "value" in value:  # a recipe's {filter, value} too
            common[parameter] = value
            continue
        for name, single in value.items():
            if name not in own:
                raise MethodError(
                    f"{parameter} is given for {name!r}, which is no model",
                    f"The models are {', '.join(models)}.",
                )
            own[name][parameter] = single
    return own, common
