"""Data sets as the experiments take them: a fixed part, pooled, of mean 0 and deviation 1."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from isthmus.errors import IsthmusError
from isthmus.lab.data.named import Data, training_data
from isthmus.lab.noise.settings import NetworkSettings


def noise_data(settings: NetworkSettings, cache: Path) -> Data:
    """The examples of a training's settings.

    Args:
        settings: Which, and how many.
        cache: Where `make data` put its data.

    Raises:
        IsthmusError: Unknown or missing data, too few examples, or pictures that are too small to pool.
    """
    found = training_data(settings.data, cache, context=settings.context)
    inputs, targets = _some(found.inputs, found.targets, settings.examples, settings.data, "train")
    test, test_targets = _some(
        found.test_inputs, found.test_targets, settings.test, settings.data, "test"
    )
    if inputs.is_floating_point():
        inputs, test = (_pooled(each, settings) for each in (inputs, test))
        mean, deviation = inputs.mean(), inputs.std()
        inputs, test = (inputs - mean) / deviation, (test - mean) / deviation
    return replace(
        found, inputs=inputs, targets=targets, test_inputs=test, test_targets=test_targets
    )


def _some(
    inputs: Tensor, targets: Tensor, count: int, name: str, part: str
) -> tuple[Tensor, Tensor]:
    """So many examples, the same ones every time."""
    if count > len(targets):
        raise IsthmusError(
            f"{name} has {len(targets)} examples to {part}, not {count}",
            f"Lower `{'examples' if part == 'train' else 'test'}`.",
        )
    chosen = torch.randperm(len(targets), generator=torch.Generator().manual_seed(0))[:count]
    return inputs[chosen], targets[chosen]


def _pooled(pictures: Tensor, settings: NetworkSettings) -> Tensor:
    if settings.pool > min(pictures.shape[2:]):
        raise IsthmusError(
            f"{settings.data} has pictures of {pictures.shape[2]} x {pictures.shape[3]} pixels; they cannot be "
            f"pooled over squares of {settings.pool}",
            "Lower `pool`.",
        )
    if settings.pool == 1:
        return pictures
    pooled: Tensor = nn.functional.avg_pool2d(pictures, settings.pool)
    return pooled
