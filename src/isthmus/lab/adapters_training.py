"""Adapters of one base encoder, one a task, trained with PEFT and kept for the next run."""

from __future__ import annotations

import copy
from dataclasses import asdict, replace
from pathlib import Path

import peft
import torch

from isthmus.lab.adapters_settings import AdapterSettings
from isthmus.lab.cache import is_made, make_folder
from isthmus.lab.encoders import Encoder, descend
from isthmus.lab.experts import Workshop
from isthmus.lab.heads import Head
from isthmus.lab.machine import without_renames
from isthmus.lab.progress import Narrator
from isthmus.lab.text import Task

_FORMAT = 1
"""Raised when the way of training changes, so that adapters of old are not taken for new ones."""


class AdapterWorkshop(Workshop):
    """Makes heads and adapters from one base encoder, for one seed.

    Args:
        base: Folder of the base encoder.
        output: Heads go to ``heads/``, adapters to ``adapters/`` in it.
        settings: How to train.
        seed: One of its seeds.
        narrator: Told of stages.
        encoder: The base, if it is loaded already.
    """

    def __init__(
        self,
        base: Path,
        output: Path,
        settings: AdapterSettings,
        seed: int,
        narrator: Narrator,
        encoder: Encoder | None = None,
    ) -> None:
        super().__init__(base, output, settings.at(seed), narrator, encoder)
        self._lora = settings.lora

    def adapter(self, task: Task, head: Head) -> Path:
        """Folder of the task's adapter, trained under the task's head, which stays fixed."""
        folder = self._output / "adapters" / task.name
        tuning = self._settings.fine_tuning
        record = {
            **self._head_record(task),
            "adapter_format": _FORMAT,
            "fine_tuning": asdict(tuning),
            "lora": asdict(self._lora),
            "peft": peft.__version__,
        }
        if is_made(folder, record):
            self._narrator.say(f"Adapter of {task.name}: made before, reused")
            return folder

        def fill(partial_folder: Path) -> None:
            with torch.random.fork_rng(devices=[]), without_renames():
                torch.manual_seed(tuning.seed)
                model = peft.get_peft_model(
                    copy.deepcopy(self.encoder.model),
                    peft.LoraConfig(
                        r=self._lora.rank,
                        lora_alpha=self._lora.alpha,
                        target_modules=self._lora.modules,
                        task_type="FEATURE_EXTRACTION",
                    ),
                ).eval()
            trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
            total = tuning.epochs * len(task.train)
            with self._narrator.stage(f"Adapter of {task.name}", total) as advance:
                descend(
                    replace(self.encoder, model=model),
                    trained,
                    head,
                    task.train,
                    task.max_length,
                    tuning,
                    advance,
                )
            model.save_pretrained(partial_folder)

        make_folder(folder, record, fill)
        return folder
