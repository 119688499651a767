"""A plan as plain data, for `--json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.engine.plan import Plan
from isthmus.engine.tasks import CarryTask, MergeTask, SolvedTask, Task


def plan_as_data(plan: Plan, workers: int) -> dict[str, Any]:
    """Everything that a plan says, as JSON can hold it.

    Args:
        plan: The plan.
        workers: Threads, for the peak of the memory.
    """
    files = {name: shard.file for shard in plan.layout.shards for name in shard.tensors}
    tensors = [
        {
            "name": info.name,
            "dtype": info.dtype.torch_name,
            "shape": list(info.shape),
            "file": files[info.name],
            **_action(task),
        }
        for task in plan.tasks
        for info in task.outputs
    ]
    return {
        "method": plan.method.name,
        "donor": plan.donor.label,
        "bytes_to_read": plan.bytes_to_read,
        "readings": plan.readings,
        "bytes_to_write": plan.bytes_to_write,
        "buffer_bytes": plan.peak_memory(workers),
        "files": [shard.file for shard in plan.layout.shards],
        "notes": list(plan.notes),
        "tensors": tensors,
    }


def _action(task: Task) -> dict[str, Any]:
    """What happens, and to what."""
    if isinstance(task, CarryTask):
        return {"action": "carry", "reason": task.reason}
    parameters = _values(task.settings.shared) | _values(task.settings.per_expert)
    if isinstance(task, MergeTask | SolvedTask):
        base = task.base if isinstance(task, MergeTask) else None
        operands = ([base] if base else []) + list(task.experts)
        inputs = [{"model": operand.model.label, "tensor": operand.name} for operand in operands]
        return {"action": task.method.name, "inputs": inputs, "parameters": parameters}
    merge = task.merge
    return {
        "action": merge.method.name,
        "inputs": [
            {"model": part.adapter.label, "module": merge.module, "rank": part.update.rank}
            for part in merge.parts
            if part is not None
        ],
        "parameters": parameters,
        "space": merge.space or merge.method.spaces[0],
        "rank": merge.rank,
    }


def _values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
