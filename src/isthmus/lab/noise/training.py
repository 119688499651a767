"""Deterministic training that can be stopped at any step, and stops by itself where it diverges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any
from zipfile import is_zipfile

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.lab.data.named import Data
from isthmus.lab.noise.settings import TrainingSettings
from isthmus.lab.sweeps.diverged import Diverged
from isthmus.optim.lion_k import Lion, Muon, Signum
from isthmus.optim.parameter_groups import parameter_groups

_SECONDS = 30.0
"""Between two checkpoints."""

_RISE = 3.0
"""A loss that stays above so many times that of guessing has diverged; single peaks have not."""

_STEPS = 20
"""For how many steps it stays there."""

_LEARNT = 0.97
"""A training whose last epoch has a mean loss above this share of that of guessing has learnt nothing."""


def train(
    network: nn.Module,
    data: Data,
    settings: TrainingSettings,
    *,
    epochs: tuple[int, int],
    order: tuple[int, ...],
    checkpoint: Path | None = None,
    tell: Callable[[float], None] = lambda _share: None,
) -> list[float]:
    """Train from the beginning of one epoch to the beginning of another; the network ends in evaluation mode.

    The optimizer starts anew, also in the middle of a training: its momentum lasts for 1/(1 − μ) steps.

    Args:
        network: Trained in place.
        data: To train on.
        settings: Of the whole training, whose schedule goes on.
        epochs: The first, and the one after the last.
        order: Decides, with the number of the epoch, the order of examples and how they are augmented.
        checkpoint: A file. Every half minute all is kept there, and read if it is there at the start, so that
            a training that was killed ends in the same weights as one that was not; at the end too, so that a
            training that is done is not done again.
        tell: Told the share that is done.

    Returns:
        The mean loss of every epoch.

    Raises:
        Diverged: The loss is not finite, stays far above that of guessing, or is no better than that at the end.
    """
    optimizers = _optimizers(network, settings)
    rates = [[group["lr"] for group in one.param_groups] for one in optimizers]
    guessing = math.log(data.classes)
    first, last = epochs
    each = len(data.targets) // settings.batch
    start, curve, sums, recent = first * each, list[float](), list[float](), list[float]()
    if checkpoint is not None and (kept := _kept(checkpoint)) is not None:
        network.load_state_dict(kept["network"])
        for one, state in zip(optimizers, kept["optimizers"], strict=True):
            one.load_state_dict(state)
        start, curve, sums, recent = kept["step"], kept["curve"], kept["sums"], kept["recent"]
    saved = monotonic()
    network.train()
    for step in range(start, last * each):
        epoch, place = divmod(step, each)
        if place == 0 or step == start:
            batches = _batches(data, settings, order, epoch, place)
        factor = _factor(settings, step, settings.epochs * each)
        for one, highest in zip(optimizers, rates, strict=True):
            for group, rate in zip(one.param_groups, highest, strict=True):
                group["lr"] = rate * factor
            one.zero_grad()
        loss = mean_loss(network, next(batches))
        value = float(loss.detach())
        recent = [*recent, value][-_STEPS:]
        stays = len(recent) == _STEPS and min(recent) > _RISE * guessing
        if not math.isfinite(value) or stays:
            raise Diverged(step, value)
        loss.backward()  # type: ignore[no-untyped-call]
        for one in optimizers:
            one.step()
        sums.append(value)
        if place == each - 1:
            curve.append(sum(sums) / len(sums))
            sums = []
            tell((epoch + 1 - first) / (last - first))
        due = step + 1 == last * each or monotonic() - saved > _SECONDS
        if checkpoint is not None and due:
            _keep(
                checkpoint,
                {
                    "network": network.state_dict(),
                    "optimizers": [one.state_dict() for one in optimizers],
                    "step": step + 1,
                    "curve": curve,
                    "sums": sums,
                    "recent": recent,
                },
            )
            saved = monotonic()
    network.eval()
    if last == settings.epochs and curve[-1] > _LEARNT * guessing:
        raise Diverged(last * each, curve[-1])
    return curve


def mean_loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross entropy of classes, in the last dimension of the outputs, over examples or tokens."""
    outputs = network(batch[0])
    return nn.functional.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())


def _kept(checkpoint: Path) -> dict[str, Any] | None:
    """What was kept; None of a file that is not whole: a training from the beginning ends in the same weights."""
    # A file that was cut short has no end of an archive.
    if not is_zipfile(checkpoint):
        return None
    found: dict[str, Any] = torch.load(checkpoint, weights_only=True)
    return found


def _keep(checkpoint: Path, state: dict[str, object]) -> None:
    partial = checkpoint.with_name(checkpoint.name + ".partial")
    torch.save(state, partial)
    partial.replace(checkpoint)


def _factor(settings: TrainingSettings, step: int, steps: int) -> float:
    if settings.schedule == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def _batches(
    data: Data, settings: TrainingSettings, order: tuple[int, ...], epoch: int, skipped: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one epoch in its order; the rest of it that fills none is left out."""
    generator = np.random.default_rng([*order, epoch])
    places = torch.from_numpy(generator.permutation(len(data.targets)))
    for number in range(len(places) // settings.batch):
        shifts = None
        if settings.augment:
            size = (2, settings.batch)
            shifts = torch.from_numpy(generator.integers(0, 2 * settings.augment + 1, size))
        if number < skipped:
            continue
        chosen = places[number * settings.batch : (number + 1) * settings.batch]
        inputs = data.inputs[chosen]
        if shifts is not None:
            inputs = _shifted(inputs, shifts, settings.augment)
        yield inputs, data.targets[chosen]


def _shifted(pictures: Tensor, shifts: Tensor, most: int) -> Tensor:
    """Pictures [N, C, H, W] moved by shifts [2, N], of 0 to 2·most pixels where `most` is none at all."""
    count, _, height, width = pictures.shape
    padded = nn.functional.pad(pictures, (most,) * 4)
    rows = shifts[0, :, None, None] + torch.arange(height)[None, :, None]
    columns = shifts[1, :, None, None] + torch.arange(width)[None, None, :]
    return padded[torch.arange(count)[:, None, None], :, rows, columns].permute(0, 3, 1, 2)


def _optimizers(network: nn.Module, settings: TrainingSettings) -> list[torch.optim.Optimizer]:
    lr, decay = settings.lr, settings.weight_decay
    if settings.optimizer == "sgd":
        return [
            torch.optim.SGD(
                network.parameters(), lr, momentum=settings.momentum, weight_decay=decay
            )
        ]
    if settings.optimizer == "adamw":
        return [torch.optim.AdamW(network.parameters(), lr, weight_decay=decay)]
    if settings.optimizer == "lion":
        return [Lion(network.parameters(), lr, weight_decay=decay)]
    if settings.optimizer == "signum":
        return [Signum(network.parameters(), lr, momentum=settings.momentum, weight_decay=decay)]
    groups = parameter_groups(network)
    matrices = [group for group in groups if group["kind"] == "matrices"]
    rest = [{"params": group["params"]} for group in groups if group["kind"] != "matrices"]
    return [
        Muon(matrices, lr, momentum=settings.momentum, weight_decay=decay),
        torch.optim.AdamW(rest, lr / 10, weight_decay=decay),
    ]
