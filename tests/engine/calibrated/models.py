"""A family of small networks with examples, and recipes for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from tests.models.networks import build

WORDS = tuple("abcdefghijklmnopqrstuvwxyz")
KINDS = ("bert", "gpt2", "llama")


def texts(seed: int, count: int = 30) -> list[str]:
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS[seed::2], draw.integers(3, 12))) for _ in range(count)]


def near(network: nn.Module, seed: int) -> nn.Module:
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))
    return network


def recipe(root: Path, kind: str = "bert", method: str = "projection", **parameters) -> dict:
    return {
        "merge_method": method,
        "base_model": str(root / kind / "base"),
        "models": [
            {"model": str(root / kind / name), "calibration": str(root / f"{name}.jsonl")}
            for name in ("one", "two")
        ],
        "parameters": parameters,
        "calibration": {"tokens": 16},
    }


def state(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def network(folder: Path, kind: str) -> nn.Module:
    made = build(kind)
    missing = made.load_state_dict(state(folder), strict=False)
    assert not missing.unexpected_keys
    return made.double().eval()


def inputs(seed: int):
    """As the tokenizer makes them, one text at a time."""
    return [
        {"input_ids": torch.tensor([[WORDS.index(word) + 3 for word in text.split()]])}
        for text in texts(seed)
    ]
