"""Which pairs `isthmus lab noise` trains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from typing import Any

from isthmus.lab.noise.settings import PairSettings
from isthmus.lab.sweeps.plan import Sweep

EXPERIMENT = "noise-pair"
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

_MLP_KNOBS = {
    "lr": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
    "batch": (16, 64, 256),
    "momentum": (0.0, 0.9),
}
_PICTURE_KNOBS = {
    "lr": (0.01, 0.03, 0.1, 0.3, 1.0),
    "batch": (16, 64, 256),
    "momentum": (0.0, 0.9),
}
_TEXT_KNOBS = {"lr": (1e-3, 3e-3, 1e-2, 3e-2), "batch": (4, 16, 64)}


def noise_panels(*, quick: bool = False) -> dict[str, tuple[Mapping[str, Any], ...]]:
    """The pairs of the experiment, by the name of the picture that shows them.

    Args:
        quick: MLPs only, a coarse grid, and smaller trainings.
    """
    if quick:
        base = _MLP | {"examples": 2000, "epochs": 6, "test": 5000, "shared": 1}
        knobs = {"lr": (0.01, 0.1, 0.3, 1.0), "batch": (16, 64), "momentum": (0.0, 0.9)}
        return {"MLP, one epoch of six shared": tuple(_in_range(base, knobs, (1e-4, 1e-1)))}
    panels: dict[str, tuple[Mapping[str, Any], ...]] = {}
    for shared, share in ((0, "common start"), (2, "two epochs of ten shared")):
        panels[f"MLP, {share}"] = tuple(
            _in_range(_MLP | {"shared": shared}, _MLP_KNOBS, (1e-4, 7e-2))
        )
    for name, base, knobs, every in (
        ("ResNet", _RESNET, _PICTURE_KNOBS, 2),
        ("DenseNet", _DENSENET, _PICTURE_KNOBS, 2),
        ("Decoder", _DECODER, _TEXT_KNOBS, 1),
    ):
        for shared, share in ((0, "common start"), (1, "one epoch shared")):
            panels[f"{name}, {share}"] = tuple(
                _in_range(base | {"shared": shared}, knobs, (2e-4, 1.0), every)
            )
    one = _RESNET | {"shared": 1, "lr": 0.1, "batch": 32}
    panels["ResNet, decay and augmentation"] = tuple(
        run
        for decay, augment in product((0.0, 1e-3, 3e-3, 1e-2, 3e-2), (0, 2))
        for run in _seeds(one | {"weight_decay": decay, "augment": augment})
    )
    return panels


def noise_sweep(panels: Mapping[str, tuple[Mapping[str, Any], ...]]) -> Sweep:
    """All pairs of all panels."""
    return Sweep(EXPERIMENT, tuple(chain.from_iterable(panels.values())))


def _in_range(
    base: Mapping[str, Any],
    knobs: Mapping[str, Sequence[float]],
    scales: tuple[float, float],
    every: int = 1,
) -> Iterator[Mapping[str, Any]]:
    """The product of knobs, as far as noise scales lie in a range; of a chessboard one colour if `every` is 2."""
    for places in product(*(range(len(values)) for values in knobs.values())):
        if sum(places) % every:
            continue
        chosen = {
            name: values[at] for (name, values), at in zip(knobs.items(), places, strict=True)
        }
        settings = {**base, **chosen}
        if scales[0] <= PairSettings(**settings).noise_scale <= scales[1]:
            yield from _seeds(settings)


def _seeds(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    return (dict(settings) | {"seed": seed} for seed in SEEDS)
