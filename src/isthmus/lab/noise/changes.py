"""What moves a training's noise scale: one setting at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.lab.noise.evidence import Experiment
from isthmus.models.training_settings import TrainingSettings
from isthmus.optim.noise_scale import adaptive_noise_scale, effective_noise_scale

_SMALLEST = 4
"""Examples of a batch that is proposed."""

_LARGEST_MOMENTUM = 0.99
"""Of what is proposed."""


@dataclass(frozen=True)
class Change:
    """One setting, changed alone.

    Attributes:
        setting: Which.
        old: Its value now.
        value: The new one.
        factor: On the setting; on 1 − μ if it is momentum.
        noise_scale: That follows.
        cost: What it costs, in words.
    """

    setting: str
    old: float
    value: float
    factor: float
    noise_scale: float
    cost: str


def changes(
    settings: TrainingSettings, noise: float, low: float, high: float, found: Experiment
) -> Iterator[Change]:
    """Single changes, each of which brings the noise scale to the best gain or the best merged model, the nearer one.

    Not to the end of the good stretch, which may lie at a cliff.

    Args:
        settings: Of the training, with learning rate and batch size.
        noise: Its noise scale.
        low: The beginning of the good stretch.
        high: Its end.
        found: The experiment; outside its range, and inside the good stretch, there are no changes.
    """
    least, largest = found.range
    if low <= noise <= high or not least <= noise <= largest:
        return
    goals = (found.optimum.at, found.most_accurate.noise_scale)
    factor = (max(goals) if noise > high else min(goals)) / noise
    lr, batch, momentum = settings.lr, settings.batch_size, settings.momentum or 0.0
    assert lr is not None
    assert batch is not None

    def scale(lr: float, batch: int, momentum: float) -> float:
        if settings.adaptive:
            return adaptive_noise_scale(lr, batch)
        return effective_noise_scale(lr, batch, momentum)

    def trained(lr: float, momentum: float) -> str:
        tried = max(
            point.settings["lr"] / (1 - point.settings.get("momentum", 0.0))
            for point in found.points
        )
        if lr / (1 - momentum) <= tried:
            return ""
        name = "η" if settings.adaptive else "η/(1 − μ)"
        return f"; more than was trained with here ({name} up to {tried:.2g})"

    more = factor > 1
    rate = lr * factor
    cost = (
        f"a larger rate can diverge: watch the loss{trained(rate, momentum)}"
        if more
        else "training is slower; more epochs may be needed"
    )
    yield Change("learning rate", lr, rate, factor, scale(rate, batch, momentum), cost)
    size = round(batch / factor ** (2 if settings.adaptive else 1))
    # A batch of one or two is no batch; a much larger one leaves few steps.
    if size >= _SMALLEST:
        cost = (
            "more steps an epoch"
            if more
            else f"{size / batch:.3g} times fewer steps an epoch; accumulation does it on the same memory"
        )
        yield Change("batch size", batch, size, size / batch, scale(lr, size, momentum), cost)
    other = 1 - (1 - momentum) / factor
    if not settings.adaptive and 0 <= other <= _LARGEST_MOMENTUM:
        cost = (
            f"averages more steps{trained(lr, other)}"
            if more
            else "smaller steps: more epochs may be needed"
        )
        yield Change("momentum", momentum, other, 1 / factor, scale(lr, batch, other), cost)
