"""Training small networks, each once: the result is kept under what it was made from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from isthmus.errors import IsthmusError
from isthmus.lab.cache import content_key, is_made, make_folder, one_at_a_time
from isthmus.lab.networks.state import state

Pair = tuple[Tensor, Tensor]
Optimizer = Callable[[nn.Module], Sequence[torch.optim.Optimizer]]
"""Makes the optimizers of a network; several may share its parameters out."""


def kept(
    folder: Path, record: Mapping[str, Any], train: Callable[[], nn.Module]
) -> dict[str, Tensor]:
    """A trained network's tensors: trained now, or read from where they were kept.

    Args:
        folder: Where they are kept, in a folder of their own for every record.
        record: All that they depend on, as JSON values.
        train: Makes the network.
    """
    made_from = {"format": 1, "torch": torch.__version__, **record}
    # Other settings must not replace what took long to train.
    folder = folder.with_name(f"{folder.name}-{content_key(made_from)[:8]}")
    # Runs side by side often begin with the same network.
    with one_at_a_time(folder):
        if not is_made(folder, made_from):

            def fill(partial_folder: Path) -> None:
                save_file(state(train()), partial_folder / "model.safetensors")

            make_folder(folder, made_from, fill)
    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return tensors


def fit(
    network: nn.Module,
    batches: Iterator[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    steps: int,
    *,
    warmup: int = 0,
    cosine: bool = True,
    clip: float | None = None,
    advance: Callable[[int], None] = lambda _units: None,
) -> nn.Module:
    """Train, after a linear warm-up with a cosine schedule; the network ends in evaluation mode.

    Args:
        network: Trained in place.
        batches: At least as many as steps.
        loss: Of a batch.
        optimizers: With the highest learning rates.
        steps: How many.
        warmup: Steps to reach those rates.
        cosine: Whether rates fall to 0 after that, along a half wave.
        clip: Largest norm of the gradient.
        advance: Told of each step.

    Raises:
        IsthmusError: The loss is not finite: the learning rate is too high.
    """
    rates = [[group["lr"] for group in one.param_groups] for one in optimizers]
    network.train()
    for step in range(steps):
        factor = _schedule(step, steps, warmup) if cosine or step < warmup else 1.0
        for one, highest in zip(optimizers, rates, strict=True):
            for group, rate in zip(one.param_groups, highest, strict=True):
                group["lr"] = rate * factor
            one.zero_grad()
        value = loss(network, next(batches))
        if not torch.isfinite(value):
            raise IsthmusError(
                f"The loss of {type(network).__name__} is {value.item()} in step {step}",
                "Lower the learning rate.",
            )
        value.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        for one in optimizers:
            one.step()
        advance(1)
    return network.eval()


def _schedule(step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def shuffled(data: Pair, size: int, seed: int) -> Iterator[Pair]:
    """Batches, epoch after epoch, each in another order; the rest of an epoch is left out."""
    generator = torch.Generator().manual_seed(seed)
    x, y = data
    while True:
        order = torch.randperm(len(y), generator=generator)
        for start in range(0, len(y) - size + 1, size):
            chosen = order[start : start + size]
            yield x[chosen], y[chosen]


def whole(data: Pair, size: int = 1000) -> list[Pair]:
    """All of the data in order, in batches."""
    return list(zip(torch.split(data[0], size), torch.split(data[1], size), strict=True))


def cross_entropy(network: nn.Module, batch: Pair) -> Tensor:
    """The mean loss of a classifier."""
    return nn.functional.cross_entropy(network(batch[0]), batch[1])
