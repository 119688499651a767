from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from isthmus.lab.packaged import minilm
from isthmus.lab.settings import DemoSettings, FineTuning, Sizes


def average(recipe: dict[str, Any], out: Path, *, overwrite: bool = False) -> None:
    """A stand-in for `isthmus.merge`: whatever the method, the mean of the listed models."""
    folders = [Path(model["model"]) for model in recipe["models"]]
    shutil.copytree(folders[0], out, dirs_exist_ok=overwrite)
    states = [load_file(folder / "model.safetensors") for folder in folders]
    mean = {name: sum(state[name] for state in states) / len(states) for name in states[0]}
    save_file(mean, out / "model.safetensors", {"format": "pt"})


def copied(tuned: Path, base: Path, out: Path, *, rank: int, overwrite: bool) -> None:  # noqa: ARG001
    """A stand-in for `isthmus.extract`: the fine-tune itself."""
    shutil.copytree(tuned, out, dirs_exist_ok=overwrite)


# Before torch is loaded: threads that spin while they wait slow down a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def small_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MiniLM's architecture and tokenizer at a hundredth of the size, with random weights."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    folder = tmp_path_factory.mktemp("small") / "encoder"
    config = BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm(), local_files_only=True).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny() -> DemoSettings:
    """Enough to run every line, not enough to learn anything."""
    sizes = Sizes(train=24, validation=6, test=10, max_length=12)
    return DemoSettings(
        sizes={"movies": sizes, "tweets": sizes},
        threads=1,
        fine_tuning=FineTuning(batch_size=8, learning_rate=1e-4),
    )
