"""Which networks `isthmus lab noise` trains."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, Literal

from isthmus.lab.noise.settings import PairSettings
from isthmus.lab.sweeps.plan import Sweep

Kind = Literal["pairs", "transfer", "text"]
SEEDS = (0, 1, 2)

_MLP = {"architecture": "mlp", "data": "mnist", "width": 64, "epochs": 10, "rebasin": True}
_RESNET = {
    "architecture": "resnet",
    "data": "fashion-mnist",
    "pool": 2,
    "width": 8,
    "depth": 1,
    "examples": 3000,
    "test": 5000,
    "epochs": 6,
}
_DENSENET = _RESNET | {"architecture": "densenet", "width": 6, "depth": 2}
_DECODER = {
    "architecture": "decoder",
    "data": "kernel",
    "width": 48,
    "depth": 2,
    "context": 48,
    "examples": 3000,
    "test": 1000,
    "epochs": 4,
    "optimizer": "adamw",
}

_VIT = {
    "architecture": "vit",
    "data": "fashion-mnist",
    "source": "mnist",
    "width": 32,
    "depth": 2,
    "examples": 4000,
    "test": 5000,
    "epochs": 4,
    "optimizer": "adamw",
}
_VIT_RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3)

_MINILM: Mapping[str, Any] = {
    "tasks": ("movies", "tweets"),
    "examples": 1600,
    "validation": 100,
    "test": 400,
    "tokens": 32,
}
_MINILM_RATES = (3e-6, 1e-5, 5e-5, 1e-4, 2e-4, 4e-4, 1e-3)

_MLP_KNOBS = {
    "lr": (0.003, 0.0055, 0.01, 0.018, 0.03, 0.055, 0.1, 0.18, 0.3),
    "batch": (4, 16, 64),
    "momentum": (0.0, 0.9),
}
_MLP_RATE = 0.31
"""Of η/(1 − μ); above it MLPs diverge or learn badly in large batches too, where there is hardly any noise."""
_PICTURE_KNOBS = {
    "lr": (0.01, 0.03, 0.1, 0.3, 1.0),
    "batch": (16, 64, 256),
    "momentum": (0.0, 0.9),
}
_PICTURE_RATE = 3.1
"""The same for networks with BatchNorm, which stand more."""
_TEXT_KNOBS = {"lr": (1e-3, 3e-3, 1e-2, 3e-2), "batch": (4, 16, 64)}


@dataclass(frozen=True)
class PanelPlan:
    """Runs that are drawn together.

    Attributes:
        name: For people.
        runs: Their settings.
        figure: The merging gain that is drawn, as the experiment calls it.
    """

    name: str
    runs: tuple[Mapping[str, Any], ...]
    figure: str = "gain"


@dataclass(frozen=True)
class NoiseGrid:
    """What is trained, and how it is drawn.

    Attributes:
        experiment: Of the sweep.
        panels: In the order of the report; several may draw the same runs.
    """

    experiment: str
    panels: tuple[PanelPlan, ...]

    @property
    def sweep(self) -> Sweep:
        """All runs of all panels, each of them once."""
        every = {id(run): run for run in chain.from_iterable(each.runs for each in self.panels)}
        return Sweep(self.experiment, tuple(every.values()))


def noise_grid(kind: Kind = "pairs", *, quick: bool = False) -> NoiseGrid:
    """The runs of an experiment.

    Args:
        kind: `pairs` of networks that differ in the order of their data; `transfer` of a network pretrained on
            other pictures; or `text`, a pretrained encoder moved to tasks of text.
        quick: A coarse grid and smaller trainings; of the pairs MLPs only.
    """
    if kind == "text":
        return NoiseGrid("noise-text-transfer", tuple(_texts(quick)))
    if kind == "transfer":
        return NoiseGrid("noise-transfer", tuple(_transfers(quick)))
    return NoiseGrid("noise-pair", tuple(_quick_pairs() if quick else _pairs()))


def _quick_pairs() -> Iterator[PanelPlan]:
    base = _MLP | {"examples": 2000, "epochs": 6, "test": 5000, "shared": 1}
    knobs = {"lr": (0.01, 0.03, 0.1, 0.3), "batch": (4, 16, 64), "momentum": (0.0, 0.9)}
    runs = _in_range(base, knobs, (1e-4, 5e-2), _MLP_RATE)
    yield PanelPlan("MLP, one epoch of six shared", tuple(runs))


def _pairs() -> Iterator[PanelPlan]:
    for shared, share in ((0, "common start"), (2, "two epochs of ten shared")):
        runs = _in_range(_MLP | {"shared": shared}, _MLP_KNOBS, (1e-4, 5e-2), _MLP_RATE)
        yield PanelPlan(f"MLP, {share}", tuple(runs))
    for name, base, knobs, most, every in (
        ("ResNet", _RESNET | {"rebasin": True}, _PICTURE_KNOBS, _PICTURE_RATE, 2),
        ("DenseNet", _DENSENET, _PICTURE_KNOBS, _PICTURE_RATE, 2),
        ("Decoder", _DECODER, _TEXT_KNOBS, math.inf, 1),
    ):
        for shared, share in ((0, "common start"), (1, "one epoch shared")):
            runs = _in_range(base | {"shared": shared}, knobs, (2e-4, 1.0), most, every)
            yield PanelPlan(f"{name}, {share}", tuple(runs))
    one = _RESNET | {"shared": 1, "lr": 0.1, "batch": 32}
    yield PanelPlan(
        "ResNet, decay and augmentation",
        tuple(
            run
            for decay, augment in product((0.0, 1e-3, 3e-3, 1e-2, 3e-2), (0, 2))
            for run in _seeds(one | {"weight_decay": decay, "augment": augment})
        ),
    )


def _transfers(quick: bool) -> Iterator[PanelPlan]:
    base = _VIT | {"examples": 1000, "epochs": 2, "source_epochs": 2} if quick else _VIT
    for tasks, of in (("same", "one task twice"), ("halves", "a task each")):
        knobs = [*((rate, 32) for rate in _VIT_RATES), *((3e-4, batch) for batch in (8, 128))]
        runs = tuple(
            run
            for rate, batch in (knobs[::2] if quick else knobs)
            for run in _seeds(base | {"tasks": tasks, "lr": rate, "batch": batch})
        )
        yield from _by_method(f"ViT, {of}", runs)


def _texts(quick: bool) -> Iterator[PanelPlan]:
    base = {**_MINILM, "examples": 200, "test": 100} if quick else _MINILM
    knobs = [*((rate, 16) for rate in _MINILM_RATES), (1e-5, 64), (1e-4, 4), (1e-4, 64)]
    runs = tuple(
        run
        for rate, batch in (knobs[::2] if quick else knobs)
        for run in _seeds({**base, "lr": rate, "batch": batch})
    )
    yield from _by_method("MiniLM, a task each", runs)


def _by_method(name: str, runs: tuple[Mapping[str, Any], ...]) -> Iterator[PanelPlan]:
    for method in ("linear", "task_arithmetic", "ties"):
        yield PanelPlan(f"{name}, {method.replace('_', ' ')}", runs, f"{method}_gain")


def _in_range(
    base: Mapping[str, Any],
    knobs: Mapping[str, Sequence[float]],
    scales: tuple[float, float],
    most: float,
    every: int = 1,
) -> Iterator[Mapping[str, Any]]:
    """The product of knobs in a range of noise scales, η/(1 − μ) at `most` so large; half of it, as on a chessboard, if `every` is 2."""
    for places in product(*(range(len(values)) for values in knobs.values())):
        if sum(places) % every:
            continue
        chosen = {
            name: values[at] for (name, values), at in zip(knobs.items(), places, strict=True)
        }
        settings = {**base, **chosen}
        rate = chosen["lr"] / (1 - chosen.get("momentum", 0.0))
        if rate <= most and scales[0] <= PairSettings(**settings).noise_scale <= scales[1]:
            yield from _seeds(settings)


def _seeds(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (dict(settings) | {"seed": seed} for seed in SEEDS)
