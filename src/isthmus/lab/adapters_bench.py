"""Judging adapters on the tasks; what was judged once is remembered, so that a run can go on."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import peft
import torch
from peft.tuners.lora import LoraLayer

from isthmus.lab.cache import content_key, file_hash
from isthmus.lab.encoders import Encoder
from isthmus.lab.evaluate import Accuracies, evaluate
from isthmus.lab.heads import Head
from isthmus.lab.machine import without_renames
from isthmus.lab.text import Task

Part = Literal["validation", "test"]

_FORMAT = 1
"""Raised when the way of judging changes."""


class Memory:
    """Accuracies by the hash of everything that they depend on, a line of JSON each.

    Args:
        path: The file; made when the first line is written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, Accuracies] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                    self._known[entry["key"]] = entry["accuracy"]
                except (ValueError, TypeError, KeyError):
                    continue  # A run was killed while it wrote this line.

    def get(self, key: str) -> Accuracies | None:
        """What was remembered under a key, if anything."""
        return self._known.get(key)

    def put(self, key: str, accuracy: Accuracies) -> None:
        """Remember, here and on disk."""
        self._known[key] = accuracy
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            # What a killed run left behind ends without a line feed.
            if file.tell() and _last_byte(file) != b"\n":
                file.write(b"\n")
            file.write(json.dumps({"key": key, "accuracy": accuracy}).encode() + b"\n")


class Bench:
    """Judges adapters of one base under fixed heads.

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

    def accuracy(
        self,
        adapter: Path | None,
        part: Part,
        *,
        scale: float = 1.0,
        tasks: tuple[str, ...] | None = None,
    ) -> Accuracies:
        """Accuracy of the base with an adapter's update added.

        Args:
            adapter: Folder of the adapter; None for the base alone.
            part: Choose on validation, report on test.
            scale: Multiplies the adapter's update.
            tasks: Which tasks; all by default.
        """
        chosen = tuple(self._tasks) if tasks is None else tasks
        key = content_key(
            {
                "tasks": {name: self._context[name] for name in chosen},
                "part": part,
                "adapter": None if adapter is None else _adapter_hashes(adapter),
                "scale": scale,
            }
        )
        known = self._memory.get(key)
        if known is None:
            encoder = self._base if adapter is None else self._adapted(adapter, scale)
            part_of = {name: self._tasks[name] for name in chosen}
            known = evaluate(encoder, self._heads, part_of, part)
            self._memory.put(key, known)
        return known

    def _adapted(self, adapter: Path, scale: float) -> Encoder:
        """The base with a multiple of an adapter merged in, by PEFT: a check from outside."""
        with without_renames():
            model = peft.PeftModel.from_pretrained(copy.deepcopy(self._base.model), adapter)
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.scale_layer(scale)
        return replace(self._base, model=model.merge_and_unload().eval())


def adapter_rank(adapter: Path) -> int:
    """The largest rank of an adapter's modules."""
    config: dict[str, Any] = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    return max(int(rank) for rank in [config["r"], *(config.get("rank_pattern") or {}).values()])


def _adapter_hashes(adapter: Path) -> list[str]:
    return [file_hash(adapter / f"adapter_{name}") for name in ("config.json", "model.safetensors")]


def _last_byte(file: Any) -> bytes:
    file.seek(-1, 2)
    last: bytes = file.read(1)
    return last
