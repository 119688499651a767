"""From a training's settings to advice: where it lies on a measured curve, and what would move it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from isthmus.errors import TrainingError
from isthmus.lab.noise.changes import Change, changes
from isthmus.lab.noise.curve import Array
from isthmus.lab.noise.evidence import (
    DecaySeries,
    Evidence,
    Experiment,
    Family,
    Measured,
    NetworkKind,
    Split,
)
from isthmus.lab.noise.limits import limits
from isthmus.models.training_settings import TrainingSettings
from isthmus.recipes.problems import nearest

_PLACES = 400
"""Of the grid on which the curve's good part is sought."""

_NEAREST = 3
"""Measured settings that are named."""

_OPTIMIZERS = frozenset(
    [
        "sgd",
        "adam",
        "adamw",
        "nadam",
        "radam",
        "adamax",
        "adagrad",
        "adadelta",
        "adafactor",
        "rmsprop",
        "lamb",
        "lion",
        "signum",
        "signsgd",
        "muon",
        "sophia",
        "shampoo",
        "soap",
        "ademamix",
        "apollo",
        "lomo",
        "adalomo",
    ]
)
"""Words that an optimizer's name must have one of."""


@dataclass(frozen=True)
class Advice:
    """What is known of a training's mergeability.

    Attributes:
        settings: Of the training.
        formula: Of the noise scale, with its numbers.
        noise_scale: Of the training.
        experiment: The nearest that was measured.
        assumed: What was not told, and taken for the choice of the experiment.
        gain: Of the curve at this noise scale, of accuracy from 0 to 1; None outside the measured range.
        good: The stretch around the optimum where the curve is within its own scatter of the highest place, on to
            the setting whose merged model was the most accurate: more noise can cost a merge more than it costs
            its parents, and still be worth it.
        flat: Whether the whole curve varies by no more than its own scatter.
        collapse: The noise scale above `good` from which on, to the end of the range, merging costs more than that
            scatter; None if there is none, or if even the highest place costs more.
        nearest: Measured settings next to this one, in the order of their noise scale.
        changes: Each alone brings the noise scale to the optimum; none where it is as good already, or
            outside what was measured, or the curve is flat.
        decays: What decay did at one noise scale, where it was measured for such an optimizer.
        limits: Of the evidence.
    """

    settings: TrainingSettings
    formula: str
    noise_scale: float
    experiment: Experiment
    assumed: tuple[str, ...]
    gain: float | None
    good: tuple[float, float]
    flat: bool
    collapse: float | None
    nearest: tuple[Measured, ...]
    changes: tuple[Change, ...]
    decays: tuple[DecaySeries, ...]
    limits: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """Where the training lies, in a sentence."""
        least, largest = self.experiment.range
        low, high = self.good
        if self.gain is None:
            side, factor = (
                ("below", least / self.noise_scale)
                if self.noise_scale < least
                else ("above", self.noise_scale / largest)
            )
            return (
                f"The noise scale lies {factor:.2g} times {side} what was measured. The curve ends there and is "
                "not drawn on: nothing is known."
            )
        points = f"{100 * self.gain:+.2f} ± {100 * self.experiment.spread:.2f} points"
        if self.flat:
            return (
                f"The curve foretells a merging gain of {points}. It is flat within its scatter: over all of the "
                "measured range no noise scale is shown to be better than another, and there is nothing to change."
            )
        if low <= self.noise_scale <= high and self.gain < -self.experiment.spread:
            return (
                f"The curve foretells a merging gain of {points}: the merged model is worse than its parents. With less "
                "noise it loses less, but here, between the highest gain and the most accurate merge, it is itself better."
            )
        if low <= self.noise_scale <= high:
            return f"It lies in the good stretch: the curve foretells a merging gain of {points}."
        if self.gain >= self.experiment.optimum.height - self.experiment.spread:
            return (
                f"The curve foretells a merging gain of {points}: within the scatter as good as in the good stretch, from "
                "which worse settings part it. There is nothing to change."
            )
        return (
            f"Here the curve foretells a merging gain of {points}; at {self.experiment.optimum.at:.1e} it is "
            f"{100 * self.experiment.optimum.height:+.2f}. There is too "
            f"{'little' if self.noise_scale < low else 'much'} noise."
        )


def advise(
    settings: TrainingSettings,
    evidence: Evidence,
    *,
    network: NetworkKind | None = None,
    split: Split | None = None,
    method: str = "linear",
) -> Advice:
    """Find the nearest experiment and read the curve.

    Args:
        settings: Of the training.
        evidence: What was measured.
        network: Its kind; if None, a transformer for adaptive optimizers and convolutions for SGD.
        split: What the models to be merged have in common; if None, a pretrained network where such was
            measured for the optimizer, or else the first part of their training.
        method: That will merge them, where it was measured.

    Raises:
        TrainingError: Learning rate, batch size or optimizer are not told, the learning rate is 0, the optimizer is
            unknown, or nothing was measured for its like.
    """
    noise = settings.noise_scale()
    if not settings.optimizer_parts & _OPTIMIZERS:
        near = nearest(str(settings.optimizer).lower(), _OPTIMIZERS)
        raise TrainingError(
            f"{settings.source}: there is no optimizer {settings.optimizer!r} here",
            f"Did you mean {near!r}?" if near else f"Known are {', '.join(sorted(_OPTIMIZERS))}.",
        )
    if noise == 0:
        raise TrainingError(
            f"{settings.source}: a learning rate of 0 trains nothing",
            "Write the peak learning rate.",
        )
    found, assumed = _nearest(settings, evidence, network, split, method)
    line = found.curve.at(_places(found))
    low, high = _good(found)
    least, largest = found.range
    flat = bool(np.ptp(line) <= found.spread)
    inside = least <= noise <= largest
    gain = float(found.curve.at(np.array([noise]))[0]) if inside else None
    well = flat or (gain is not None and gain >= found.optimum.height - found.spread)
    return Advice(
        settings,
        _formula(settings),
        noise,
        found,
        assumed,
        gain,
        (low, high),
        flat,
        _collapse(found, high),
        _around(found.points, noise),
        () if well else tuple(changes(settings, noise, low, high, found)),
        () if settings.adaptive else evidence.decays,
        tuple(limits(settings, found, flat=flat)),
    )


def _nearest(
    settings: TrainingSettings,
    evidence: Evidence,
    network: NetworkKind | None,
    split: Split | None,
    method: str,
) -> tuple[Experiment, tuple[str, ...]]:
    family: Family = "adaptive" if settings.adaptive else "sgd"
    own = [each for each in evidence.experiments if each.family == family]
    if not own:
        raise TrainingError(
            f"Nothing was measured for {'adaptive optimizers' if family == 'adaptive' else 'SGD'}",
            "Train pairs of your own: isthmus lab sweep -h.",
        )
    assumed = list(_untold(settings))
    if network is None:
        network = "transformer" if family == "adaptive" else "convolutional"
        assumed.append(f"the network is {_NETWORKS[network]} (--network says otherwise)")
    if split is None:
        split = "pretrained" if any(each.split == "pretrained" for each in own) else "trunk"
        assumed.append(f"the models share {_SPLITS[split]} (--split says otherwise)")

    def distance(experiment: Experiment) -> tuple[bool, ...]:
        # How models part changes the curve most.
        return (
            experiment.split != split,
            experiment.network != network,
            not _same_optimizer(settings, experiment),
            experiment.method != method,
        )

    # The first in the order of the evidence, of those at the same distance.
    best = min(own, key=distance)
    for name, wanted, got in (
        ("models", _SPLITS[split], _SPLITS[best.split]),
        ("networks", _NETWORKS[network], _NETWORKS[best.network]),
        ("merges", method, best.method),
    ):
        if wanted != got:
            assumed.append(
                f"{got} stands in for {wanted}: for such {name} nothing nearer was measured"
            )
    if not _same_optimizer(settings, best):
        assumed.append(
            f"{best.optimizer} stands in for {settings.optimizer}, for which nothing was measured; steps of the two at one "
            f"learning rate differ in size, and so may the best noise scale{_LION if 'lion' in settings.optimizer_parts else ''}"
        )
    return best, tuple(assumed)


def _untold(settings: TrainingSettings) -> Iterator[str]:
    parts = settings.parts
    if parts is None:
        return
    if parts.accumulation is None:
        yield "every micro-batch is a step (--accumulation says otherwise)"
    if parts.devices is None:
        yield "one device trains (--devices says otherwise)"


def _same_optimizer(settings: TrainingSettings, experiment: Experiment) -> bool:
    words = settings.optimizer_parts
    return experiment.optimizer in words or (experiment.optimizer == "adamw" and "adam" in words)


_LION = " (for Lion its authors advise a rate 3 to 10 times below AdamW's, arXiv 2302.06675)"

_NETWORKS: dict[NetworkKind, str] = {
    "transformer": "a transformer",
    "convolutional": "a network of convolutions",
    "mlp": "an MLP",
}
_SPLITS: dict[Split, str] = {
    "pretrained": "a pretrained network",
    "trunk": "the first part of their training",
    "start": "their initial weights only",
}


def _formula(settings: TrainingSettings) -> str:
    lr, batch, parts = settings.lr, settings.batch_size, settings.parts
    product = ""
    if parts is not None:
        counts = (parts.per_device, parts.accumulation or 1, parts.devices or 1)
        product = f", B = {' · '.join(map(str, counts))} (per device · accumulated · devices)"
    if settings.adaptive:
        return f"η/√B = {lr:g}/√{batch}{product}"
    return f"η/(B(1 − μ)) = {lr:g}/({batch} · (1 − {settings.momentum or 0:g})){product}"


def _good(experiment: Experiment) -> tuple[float, float]:
    """Around the optimum, where the curve is within its scatter of the highest place; on to the best merged model."""
    places = _places(experiment)
    line = experiment.curve.at(places)
    top = int(line.argmax())
    within = line >= line[top] - experiment.spread
    first, last = top, top
    while first > 0 and within[first - 1]:
        first -= 1
    while last < len(places) - 1 and within[last + 1]:
        last += 1
    best = experiment.most_accurate.noise_scale
    return min(float(places[first]), best), max(float(places[last]), best)


def _places(experiment: Experiment) -> Array:
    return np.geomspace(*experiment.range, _PLACES)


def _collapse(experiment: Experiment, high: float) -> float | None:
    if experiment.optimum.height < -experiment.spread:
        return None
    places = _places(experiment)
    # A dip that the curve comes out of again is no collapse.
    kept = np.flatnonzero((experiment.curve.at(places) >= -experiment.spread) | (places <= high))
    return float(places[kept[-1] + 1]) if kept[-1] + 1 < len(places) else None


def _around(points: Sequence[Measured], noise: float) -> tuple[Measured, ...]:
    nearest = sorted(points, key=lambda point: abs(math.log(point.noise_scale / noise)))[:_NEAREST]
    return tuple(sorted(nearest, key=lambda point: point.noise_scale))
