"""Planning a merge of LoRA adapters, into an adapter or into a whole model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from isthmus.checkpoints import (
    AdaptedCheckpoint,
    Adapter,
    Checkpoint,
    Dtype,
    ReplacedTensors,
    ShardLayout,
    TensorInfo,
    align_names,
    check_sidecars,
)
from isthmus.checkpoints.adapter_format import adapter_config, adapter_tensors
from isthmus.engine.adapter_stage import AdapterStage, plan_adapter_stage
from isthmus.engine.devices import Processor
from isthmus.engine.module_merge import MergedAdapter, ModuleMerge, Part
from isthmus.engine.plan import Plan
from isthmus.engine.plan_models import checked_settings, compute_dtype, converted, out_dtype
from isthmus.engine.remarks import some
from isthmus.engine.streams import Operand
from isthmus.engine.tasks import ApplyTask, CarryTask, MergeTask, Task, UpdateTask
from isthmus.errors import PlanError
from isthmus.methods.method import BaseUse, Method
from isthmus.recipes import Depths, Recipe

if TYPE_CHECKING:
    from torch import Tensor

_BASE_CURE = "Name the model that the adapters were trained on: `base_model: ...`."


def require_adapter_method(method: Method) -> None:
    """Refuse a method that merges no adapters.

    Raises:
        PlanError: naming it.
    """
    if not method.spaces:
        raise PlanError(
            f"{method.name} does not merge adapters",
            "isthmus methods says which methods do. To merge whole models with adapters added, list "
            "them as base+adapter.",
        )


def plan_adapters(
    recipe: Recipe,
    opened: Mapping[str, Adapter],
    base: Checkpoint | None,
    *,
    max_shard_size: int,
    allow_nonfinite: bool,
) -> Plan:
    """Plan a merge of opened adapters.

    Args:
        recipe: What to merge.
        opened: The adapters by the names that the recipe uses.
        base: The recipe's base model, opened, or None.
        max_shard_size: Bytes of the largest weight file, for a whole model.
        allow_nonfinite: Let NaN and infinity pass in tensors that are stored in full.

    Raises:
        PlanError: if the adapters cannot be merged as asked.
    """
    experts = tuple(opened[entry.model] for entry in recipe.experts)
    planner = _Planner(recipe, experts, base, allow_nonfinite)
    planner.require_possible()
    planner.require_rank()
    return planner.model(max_shard_size) if recipe.output == "full" else planner.adapter()


@dataclass(frozen=True)
class _Planner:
    recipe: Recipe
    experts: tuple[Adapter, ...]
    base: Checkpoint | None
    allow_nonfinite: bool

    @property
    def method(self) -> Method:
        return self.recipe.method

    def require_possible(self) -> None:
        """Refuse what no choice of tensors can mend."""
        if self.recipe.output == "full" and self.base is None:
            raise PlanError("output: full needs the model to add the merged adapter to", _BASE_CURE)
        bases = {expert.label: _base_name(expert) for expert in self.experts}
        if self.recipe.base_model is None and len(set(bases.values())) > 1:
            raise PlanError(
                "the adapters belong to different base models: "
                + "; ".join(f"{label} to {base}" for label, base in bases.items()),
                "Merge adapters of one model. If these are names of the same model, say which: "
                "`base_model: ...`.",
            )

    # Modules

    @cached_property
    def _module_names(self) -> tuple[Mapping[str, str], ...]:
        """For each adapter: the modules that it changes, by their names in the output."""
        return _common_names([expert.updates for expert in self.experts])

    @cached_property
    def merges(self) -> tuple[ModuleMerge, ...]:
        """One for each module that an adapter changes, those of the first adapter first."""
        modules = dict.fromkeys(module for names in self._module_names for module in names)
        if not modules:
            raise PlanError("the adapters change no module by a low-rank update")
        return tuple(map(self._merge, modules))

    @cached_property
    def _depths(self) -> Depths:
        updated = [f"{module}.weight" for names in self._module_names for module in names]
        return Depths([*dict.fromkeys(updated), *self._saved_names])

    def _merge(self, module: str) -> ModuleMerge:
        updates = [
            expert.updates[names[module]] if module in names else None
            for expert, names in zip(self.experts, self._module_names, strict=True)
        ]
        parts = tuple(
            None if update is None else Part(expert, update)
            for expert, update in zip(self.experts, updates, strict=True)
        )
        _require_alike(module, [part for part in parts if part is not None])
        ranks = [update.rank for update in updates if update is not None]
        pattern = next(update for update in updates if update is not None)
        if self.recipe.rank is not None and self.method.compresses:
            rank = min(self.recipe.rank, *pattern.shape)
        else:
            rank = sum(ranks) if self.method.adds_ranks else max(ranks)
        name = f"{module}.weight"
        return ModuleMerge(
            module=module,
            parts=parts,
            method=self.method,
            settings=checked_settings(self.recipe, self.method, name, self._depths),
            space=self.recipe.space,
            rank=rank,
            scales=self._scales(module),
        )

    def _scales(self, module: str) -> Callable[[], Tensor | None] | None:
        """What the calibration data will say about a module, when it is known."""
        found = self._on_data
        if found is None or module not in found.weights:
            return None
        return partial(found.stage.multipliers, found.weights[module])

    @cached_property
    def _on_data(self) -> AdapterStage | None:
        """What is merged on calibration data, for methods that look at any."""
        if not self.method.calibrated:
            return None
        if self.base is None:
            raise PlanError(
                f"{self.method.name} runs the model that the adapters were trained on", _BASE_CURE
            )
        return plan_adapter_stage(self.recipe, self.base, self.experts, self._module_names)

    def require_rank(self) -> None:
        """The asked rank is one that a module can have."""
        largest = max(self.merges, key=lambda merge: merge.rank)
        if not self.method.compresses and (self.recipe.rank or largest.rank) < largest.rank:
            raise PlanError(
                f"{self.method.name} keeps all factors, {largest.rank} of them in {largest.module}, and "
                f"rank: {self.recipe.rank} is less",
                "Remove rank, or write merge_method: task_arithmetic, which is cut to it.",
            )
        most = max(min(merge.shape) for merge in self.merges)
        if self.recipe.rank is not None and self.recipe.rank > most:
            raise PlanError(
                f"rank: {self.recipe.rank} is more than any of the adapted weights can have",
                f"Ask for {most} at most, which keeps everything.",
            )

    # Tensors that adapters store in full

    @cached_property
    def saved(self) -> tuple[MergeTask, ...]:
        """Merges of `modules_to_save` and trained biases, named as in the base model."""
        return tuple(task for task in map(self._saved, self._saved_names) if task is not None)

    @cached_property
    def _saved_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for view in self._views for name in view.tensors))

    @cached_property
    def _views(self) -> tuple[ReplacedTensors, ...]:
        names = _common_names([expert.replaced for expert in self.experts])
        return tuple(map(ReplacedTensors, self.experts, names))

    @cached_property
    def _base_names(self) -> Mapping[str, str]:
        """What the base calls the tensors that adapters store in full, and biases of modules."""
        return {} if self.base is None else align_names(self._saved_names, [*self.base.tensors])

    def _saved(self, name: str) -> MergeTask | None:
        """The merge of one tensor; None where there is none and the recipe accepts that."""
        obstacle = self._obstacle(name)
        if obstacle is not None:
            if self.recipe.tensors == "common":
                return None
            problem, cure = obstacle
            raise PlanError(
                problem,
                f"{cure} Or write `tensors: common` to leave it out, and keep each adapter's own.",
            )
        of_base = self._of_base(name)
        operands = []
        for view in self._views:
            operand = Operand(view, name) if name in view.tensors else of_base
            assert operand is not None
            operands.append(operand)
        base = of_base if self.method.base is BaseUse.REQUIRED else None
        widest = max((operand.info for operand in operands), key=lambda info: info.dtype.itemsize)
        return MergeTask(
            output=converted(TensorInfo(name, widest.dtype, widest.shape), out_dtype(self.recipe)),
            base=base,
            experts=tuple(operands),
            settings=checked_settings(self.recipe, self.method, name, self._depths),
            compute=compute_dtype(self.recipe, operands, base),
            method=self.method,
        )

    def _of_base(self, name: str) -> Operand | None:
        if self.base is None or name not in self._base_names:
            return None
        return Operand(self.base, self._base_names[name])

    def _obstacle(self, name: str) -> tuple[str, str] | None:
        """Why a tensor that adapters store in full cannot be merged, and the cure."""
        module, _, part = name.rpartition(".")
        # PEFT stores the base's own weight beside the update of an embedding; that is no conflict.
        alone = any(
            name in view.tensors and module not in names
            for view, names in zip(self._views, self._module_names, strict=True)
        )
        if part == "weight" and alone and any(merge.module == module for merge in self.merges):
            return (
                f"{module} is stored in full by one adapter and changed by low rank in another, and no "
                "adapter can hold both",
                "Merge whole models instead: list each as base+adapter.",
            )
        of_base = self._of_base(name)
        shapes = {v.label: list(v.tensors[name].shape) for v in self._views if name in v.tensors}
        lacking = [view.label for view in self._views if name not in view.tensors]
        if of_base is not None and self.base is not None:
            shapes[self.base.label] = list(of_base.info.shape)
        if len(set(map(tuple, shapes.values()))) > 1:
            return (
                f"{name}, which the adapters store in full, is of different shapes: "
                + ", ".join(f"{shape} in {label}" for label, shape in shapes.items()),
                "Such heads of different tasks have no merge.",
            )
        if of_base is None and lacking:
            return (
                f"{name} is stored in full by {next(iter(shapes))}, but not by {some(lacking)}, and "
                "without the base model's own nothing stands for theirs.",
                _BASE_CURE,
            )
        if of_base is None and self.method.base is BaseUse.REQUIRED:
            return (
                f"{name} is stored in full by the adapters, and {self.method.name} needs the base "
                "model's own to measure from",
                _BASE_CURE if self.base is None else "Take a method without a base, as linear.",
            )
        return None

    def notes(self) -> Iterator[str]:
        """What the user should know before anything is merged."""
        yield from self.recipe.notes
        left_out = sorted({*self._saved_names} - {task.output.name for task in self.saved})
        if left_out:
            yield f"left out, because it is not in all adapters or of different shapes: {some(left_out)}"
        counts = "its update counts as zero" if self.method.absent_is_zero else "it takes no part"
        for expert, names in zip(self.experts, self._module_names, strict=True):
            absent = [merge.module for merge in self.merges if merge.module not in names]
            if absent:
                yield f"{expert.label} does not change {some(absent)}: there {counts}"

    # Plans

    def adapter(self) -> Plan:
        """The plan of an adapter."""
        donor = self.experts[0]
        check_sidecars(donor)
        said = [merge.announced for merge in self.merges]
        tensors = adapter_tensors(said, [task.output for task in self.saved], self._dtype())
        tasks: list[Task] = [
            UpdateTask(merge, tensors.factors[merge.module]) for merge in self.merges
        ]
        tasks += [replace(task, output=tensors.replaced[task.output.name]) for task in self.saved]
        if self.base is not None:
            self._on_base(self.base)  # which refuses another model's
        saved = [task.output.name.rpartition(".")[0] for task in self.saved]
        modules = {
            module
            for expert in self.experts
            for module in expert.config.get("modules_to_save") or ()
            if any(f".{name}".endswith(f".{module}") for name in saved)
        }
        config = dict(donor.config)
        if len(self.saved) < len(self._saved_names):
            # PEFT expects a stored head of an adapter for such a task, and finds none.
            config.pop("task_type", None)
        return self._plan(
            tasks=tuple(tasks),
            layout=ShardLayout.plan(
                [info for task in tasks for info in task.outputs], sys.maxsize, stem="adapter_model"
            ),
            donor=donor,
            makes_adapter=True,
            base_name=self.recipe.base_model or donor.config.get("base_model_name_or_path"),
            texts={"adapter_config.json": adapter_config(config, said, sorted(modules))},
        )

    def _on_base(self, base: Checkpoint) -> tuple[AdaptedCheckpoint, MergedAdapter]:
        """The base with the merged adapter added, computed when it is read.

        Raises:
            CheckpointError: if the base lacks a module, or has it in another shape.
        """
        label = self.recipe.name or "the merged adapter"
        adapter = MergedAdapter(label, self.experts[0], self.merges)
        return AdaptedCheckpoint(base, adapter, label=f"{base.label}+{label}"), adapter

    def model(self, max_shard_size: int) -> Plan:
        """The plan of the base model with the merged adapter added."""
        base = self.base
        assert base is not None
        check_sidecars(base)
        adapted, adapter = self._on_base(base)
        merges = {merge.module: merge for merge in self.merges}
        saved = {self._base_names.get(t.output.name, t.output.name): t for t in self.saved}
        dtype = out_dtype(self.recipe)
        tasks: list[Task] = []
        for name, info in adapted.tensors.items():
            output = converted(info, dtype)
            if name in saved and name in adapted.modules:
                raise PlanError(
                    f"{name} is stored in full by one adapter and added to by another",
                    "Merge into an adapter (without output: full), and then apply it: a passthrough "
                    "recipe with base+adapter.",
                )
            if name in saved:
                tasks.append(replace(saved.pop(name), output=output))
            elif name in adapted.modules:
                merge = merges[adapted.modules[name]]
                tasks.append(ApplyTask(output, Operand(adapted, name), merge, adapter))
            else:
                tasks.append(CarryTask(output, Operand(base, name), "no adapter changes it"))
        tasks += [replace(task, output=replace(task.output, name=n)) for n, task in saved.items()]
        return self._plan(
            tasks=tuple(tasks),
            layout=ShardLayout.plan(
                [info for task in tasks for info in task.outputs],
                max_shard_size,
                tied=base.tied_by_file,
            ),
            donor=base,
            base_name=self.recipe.base_model,
            out_dtype=dtype,
        )

    def _plan(self, **own: object) -> Plan:
        fields = {
            "recipe": self.recipe,
            "method": self.method,
            "models": self.experts if self.base is None else (*self.experts, self.base),
            "out_dtype": None,
            "device": Processor(),
            "device_name": "cpu",
            "allow_nonfinite": self.allow_nonfinite,
            "notes": tuple(self.notes()),
            "stage": None if self._on_data is None else self._on_data.stage,
        }
        return Plan(**fields | own)  # type: ignore[arg-type]

    def _dtype(self) -> Dtype:
        """The recipe's, or else the widest of the factors'; float32 where two are as wide."""
        asked = out_dtype(self.recipe)
        if asked is not None:
            return asked
        found = {info.dtype for merge in self.merges for info in merge.inputs}
        widest = max(dtype.itemsize for dtype in found)
        candidates = [dtype for dtype in found if dtype.itemsize == widest]
        return candidates[0] if len(candidates) == 1 else Dtype.F32


def _common_names(models: Sequence[Collection[str]]) -> tuple[Mapping[str, str], ...]:
    """Names that several models share but for prefixes, as `align_names` finds them.

    Returns:
        For each model its own names, by those of the first model that has them.
    """
    known: list[str] = []
    found = []
    for names in models:
        aligned = align_names(known, names)
        new = {name: name for name in names if name not in set(aligned.values())}
        known += new
        found.append({**aligned, **new})
    return tuple(found)


def _base_name(adapter: Adapter) -> str:
    return str(adapter.config.get("base_model_name_or_path") or "no named model")


def _require_alike(module: str, parts: Sequence[Part]) -> None:
    """The adapters change the module's weight by matrices of one shape, in one orientation."""

    def kind(part: Part) -> tuple[object, ...]:
        return part.update.shape, part.update.kernel, part.update.embedding

    first = parts[0]
    for part in parts[1:]:
        if kind(part) != kind(first):
            raise PlanError(
                f"module {module} is {_kind_of(first)} in {first.adapter.label} and {_kind_of(part)} in "
                f"{part.adapter.label}",
                "The adapters belong to different base models.",
            )


def _kind_of(part: Part) -> str:
    update = part.update
    if update.kernel:
        return f"a convolution of kernel {list(update.kernel)}, shape {list(update.shape)}"
    return f"{'an embedding' if update.embedding else 'linear'} of shape {list(update.shape)}"
