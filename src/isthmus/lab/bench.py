"""Judging encoders on the tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Literal

import torch

from isthmus.lab.cache import content_key
from isthmus.lab.encoders import Encoder
from isthmus.lab.evaluate import Accuracies, evaluate
from isthmus.lab.heads import Head
from isthmus.lab.memory import Memory
from isthmus.lab.text import Task

Part = Literal["validation", "test"]

_FORMAT = 1
"""Raised when the way of judging changes."""


class Bench:
    """Judges what becomes of one base, under fixed heads, and nothing twice.

    Args:
        base: The base encoder.
        heads: A head per task.
        tasks: The tasks.
        memory: Where accuracies are looked up and written.
        base_hash: Of the base's weights.
    """

    def __init__(
        self,
        base: Encoder,
        heads: Mapping[str, Head],
        tasks: Mapping[str, Task],
        memory: Memory,
        base_hash: str,
    ) -> None:
        self._base = base
        self._heads = heads
        self._tasks = tasks
        self._memory = memory
        self._context = {
            name: {
                "format": _FORMAT,
                "base": base_hash,
                "head": [heads[name].weight.tolist(), heads[name].bias.tolist()],
                "task": content_key(asdict(task)),
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            }
            for name, task in tasks.items()
        }

    def judged(
        self,
        encoder: Mapping[str, Any],
        opened: Callable[[], Encoder],
        part: Part,
        tasks: tuple[str, ...] | None,
    ) -> Accuracies:
        """Accuracy of an encoder.

        Args:
            encoder: What it is made of: hashes, numbers.
            opened: Opens it, if it was not judged before.
            part: Choose on validation, report on test.
            tasks: Which tasks; all if None.
        """
        chosen = tuple(self._tasks) if tasks is None else tasks
        context = {name: self._context[name] for name in chosen}
        key = content_key({"tasks": context, "part": part, **encoder})
        known = self._memory.get(key)
        if known is None:
            part_of = {name: self._tasks[name] for name in chosen}
            known = evaluate(opened(), self._heads, part_of, part)
            self._memory.put(key, known)
        return known
