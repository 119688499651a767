"""A plan as plain data, for `--json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isthmus.engine.plan import MergeTask, Plan


def plan_as_data(plan: Plan, workers: int) -> dict[str, Any]:
    """Everything that a plan says, as JSON can hold it.

    Args:
        plan: The plan.
        workers: Threads, for the peak of the memory.
    """
    files = {name: shard.file for shard in plan.layout.shards for name in shard.tensors}
    tensors = []
    for task in plan.tasks:
        entry: dict[str, Any] = {
            "name": task.output.name,
            "dtype": task.output.dtype.torch_name,
            "shape": list(task.output.shape),
            "file": files[task.output.name],
        }
        if isinstance(task, MergeTask):
            entry |= {
                "action": plan.method.name,
                "inputs": [
                    {"model": operand.model.label, "tensor": operand.name}
                    for operand in ([task.base] if task.base else []) + list(task.experts)
                ],
                "parameters": _values(task.settings.shared) | _values(task.settings.per_expert),
            }
        else:
            entry |= {"action": "carry", "reason": task.reason}
        tensors.append(entry)
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


def _values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
