"""Judging adapters on the tasks."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
from peft.tuners.lora import LoraLayer

from isthmus.lab.bench import Bench, Part
from isthmus.lab.cache import file_hash
from isthmus.lab.encoders import Encoder
from isthmus.lab.evaluate import Accuracies
from isthmus.lab.machine import without_renames


class AdapterBench(Bench):
    """Judges adapters of one base under fixed heads."""

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
        return self.judged(
            {"adapter": None if adapter is None else _adapter_hashes(adapter), "scale": scale},
            lambda: self._base if adapter is None else self._adapted(adapter, scale),
            part,
            tasks,
        )

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
