"""A plan as text: inputs, method and parameters, by kind of module or tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from rich.filesize import decimal

from isthmus.checkpoints import TensorInfo
from isthmus.cli.text import count, printable, room, table
from isthmus.engine.comparison import module_name
from isthmus.engine.plan import Plan
from isthmus.engine.tasks import (
    ApplyTask,
    CarryTask,
    MergeTask,
    SolvedTask,
    Task,
    UpdateTask,
)
from isthmus.methods.parameters import ParameterValue

Merging: TypeAlias = MergeTask | UpdateTask | ApplyTask | SolvedTask
Value: TypeAlias = ParameterValue | None

RISE, SPREAD, EITHER = "→", "…", " or "
"""Between two numbers: from the first tensor to the last; lowest and highest; and of words."""


def cost_lines(plan: Plan, workers: int) -> list[str]:
    """Method and cost in two lines.

    Args:
        plan: The plan.
        workers: Threads, for the memory.
    """
    base = plan.recipe.base_model
    return [
        f"{plan.method.name}: {count(len(plan.recipe.experts), 'model')}"
        + ("" if base is None else f" on {printable(base)}"),
        f"{count(plan.count, 'tensor')}; inputs {decimal(plan.bytes_to_read)}, read "
        f"{plan.readings}; output {decimal(plan.bytes_to_write)} in "
        f"{count(len(plan.layout.shards), 'file')}; "
        f"buffers about {decimal(plan.peak_memory(workers))} for {count(workers, 'worker')}",
    ]


def plan_lines(plan: Plan, workers: int, *, every_tensor: bool) -> Iterator[str]:
    """The whole plan.

    Args:
        plan: The plan.
        workers: Threads, for the memory.
        every_tensor: One row a tensor, instead of one for each kind of module.
    """
    yield from cost_lines(plan, workers)
    if plan.recipe.base_model is not None:
        yield f"  base: {printable(plan.recipe.base_model)}"
    for number, entry in enumerate(plan.recipe.experts, start=1):
        yield f"  {number}: {printable(entry.model)}"
    merges = [task for task in plan.tasks if not isinstance(task, CarryTask)]
    everywhere = {name: text for name, text in _parameters(merges).items() if _is_fixed(text)}
    yield f"everywhere: {', '.join(everywhere.values()) or 'no parameters'}"
    yield ""
    rows = [
        ["tensor" if every_tensor else "module", "dtype", "shape", "tensors", "what happens"],
        *(_row(*group, everywhere) for group in _groups(plan, every_tensor)),
    ]
    if every_tensor:
        rows = [[*row[:3], row[4]] for row in rows]
    words = [column for column, header in enumerate(rows[0]) if header != "tensors"]
    yield from table(rows, left=words, width=room())
    if any("(" in row[-1] for row in rows) or any("(" in text for text in everywhere.values()):
        yield "In brackets: the values of models 1, 2, ... in order."
    for note in plan.notes:
        yield f"note: {printable(note)}"


def _groups(plan: Plan, every_tensor: bool) -> list[tuple[TensorInfo, str, list[Task]]]:
    """Tensors that differ in their layer and parameters at most, in the order of the output.

    Returns:
        For each group its first tensor, its name, and the task of every tensor.
    """
    groups: dict[tuple[object, ...], tuple[TensorInfo, str, list[Task]]] = {}
    for task in plan.tasks:
        for info in task.outputs:
            name = info.name if every_tensor else module_name(info.name)
            key = (name, info.dtype, info.shape, _kind(task))
            groups.setdefault(key, (info, name, []))[2].append(task)
    return list(groups.values())


def _kind(task: Task) -> str:
    """What happens, without parameters."""
    if isinstance(task, CarryTask):
        return f"copied: {task.reason}"
    if isinstance(task, SolvedTask):
        return f"{task.method.name} on calibration data"
    if isinstance(task, MergeTask):
        return "mean" if task.method.calibrated else task.method.name
    merge = task.merge
    return (
        f"{merge.method.name} in {merge.space or merge.method.spaces[0]} space, rank {merge.rank}"
    )


def _row(
    first: TensorInfo, name: str, tasks: Sequence[Task], everywhere: Mapping[str, str]
) -> list[str]:
    """The cells of one group; of its parameters those that are not the same everywhere."""
    merges = [task for task in tasks if not isinstance(task, CarryTask)]
    own = [text for key, text in _parameters(merges).items() if key not in everywhere]
    what = f"{_kind(tasks[0])}: {', '.join(own)}" if own else _kind(tasks[0])
    shape = "x".join(map(str, first.shape)) or "scalar"
    return [name, first.dtype.torch_name, shape, f"{len(tasks):,}", what]


def _parameters(tasks: Sequence[Merging]) -> dict[str, str]:
    """Every parameter with its value or its range over the tensors, in the method's order."""
    if not tasks:
        return {}
    settings = [task.settings for task in tasks]
    texts = {}
    for name in settings[0].per_expert:
        spans = [_span(of) for of in zip(*(s.per_expert[name] for s in settings), strict=True)]
        shown = spans[0] if len(set(spans)) == 1 else f"({', '.join(spans)})"
        texts[name] = f"{name} {shown}"
    for name in settings[0].shared:
        texts[name] = f"{name} {_span([s.shared[name] for s in settings])}"
    return texts


def _is_fixed(text: str) -> bool:
    return not any(mark in text for mark in (RISE, SPREAD, EITHER))


def _span(values: Sequence[Value]) -> str:
    """`1`; `0→1` from the first tensor to the last; `0…1` when it goes up and down between."""
    distinct = dict.fromkeys(values)
    if len(distinct) == 1:
        return _word(values[0])
    numbers = [value for value in values if type(value) is float]
    if len(numbers) < len(values):
        return EITHER.join(map(_word, distinct))
    if numbers in (sorted(numbers), sorted(numbers, reverse=True)):
        return f"{_word(numbers[0])}{RISE}{_word(numbers[-1])}"
    return f"{_word(min(numbers))}{SPREAD}{_word(max(numbers))}"


def _word(value: Value) -> str:
    """As a recipe writes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:g}"
