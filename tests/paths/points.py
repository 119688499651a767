"""Small models for paths."""

from __future__ import annotations

import torch


def model(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(4, 3, generator=draw, dtype=dtype),
        "b": torch.randn(4, generator=draw, dtype=dtype),
        "steps": torch.tensor(seed),
    }


def flat(parameters) -> torch.Tensor:
    return torch.cat([parameters[name].double().flatten() for name in ("w", "b")])


class Lazy(dict):
    """Counts what is read."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.read: list[str] = []

    def __getitem__(self, name):
        self.read.append(name)
        return super().__getitem__(name)
