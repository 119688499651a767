"""Measured merging gains against the noise scale, as the package carries them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from isthmus.lab.noise.curve import Curve, Optimum

Family = Literal["sgd", "adaptive"]
"""Whether steps grow with the gradient; noise scales of the two are not comparable."""

NetworkKind = Literal["transformer", "convolutional", "mlp"]
Split = Literal["pretrained", "trunk", "start"]
"""What the models that are merged have in common: a pretrained network, the first part of their training, or
only their initial weights."""

_KINDS: Mapping[str, NetworkKind] = {
    "mlp": "mlp",
    "resnet": "convolutional",
    "densenet": "convolutional",
    "vit": "transformer",
    "decoder": "transformer",
}
_NAMES = {
    "mlp": "MLP",
    "resnet": "ResNet",
    "densenet": "DenseNet",
    "vit": "ViT",
    "decoder": "decoder",
}
_TRAINERS = {
    "sgd": "SGD",
    "adamw": "AdamW",
    "lion": "Lion",
    "signum": "Signum",
    "muon": "Muon",
}
_NORMALISED = ("resnet", "densenet")
_FIGURES = ("lr", "batch", "momentum", "weight_decay", "augment")


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Measured(_Strict):
    """The merges of one setting.

    Attributes:
        noise_scale: Of the setting.
        gain: Accuracy of the merged model over the mean of its parents', 0 to 1; the mean over seeds.
        deviation: Over seeds.
        accuracy: Of the parents.
        seeds: How many pairs.
        settings: Learning rate, batch and so on.
    """

    noise_scale: float
    gain: float
    deviation: float
    accuracy: float
    seeds: int
    settings: dict[str, float]


class Experiment(_Strict):
    """One measured curve.

    Attributes:
        name: For people.
        method: That merged.
        family: Of the optimizer.
        network: Its kind.
        optimizer: That trained the parents.
        split: What the parents had in common.
        described: The network and its training, in words.
        parameters: Of the network; None where they are not known.
        epochs: Of the training, or of the fine-tuning.
        command: That measured it.
        results: Where all its figures are.
        bandwidth: Of the curve, in ln of the noise scale.
        spread: How far gains lie from the curve.
        optimum: Of the curve.
        points: In the order of their noise scale.
        diverged: Noise scales of the settings of which a seed diverged, which are on no curve; in order.
    """

    name: str
    method: str
    family: Family
    optimizer: str
    network: NetworkKind
    split: Split
    described: str
    parameters: int | None
    epochs: int
    command: str
    results: str
    bandwidth: float
    spread: float
    optimum: Optimum
    points: tuple[Measured, ...]
    diverged: tuple[float, ...] = ()

    @property
    def curve(self) -> Curve:
        """The gain against the noise scale."""
        x, y = np.array([[point.noise_scale, point.gain] for point in self.points]).T
        return Curve(x, y, self.bandwidth, self.spread)

    @property
    def most_accurate(self) -> Measured:
        """The setting whose merged model is best, whatever its parents are."""
        return max(self.points, key=lambda point: point.accuracy + point.gain)

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest noise scale that was measured."""
        return self.points[0].noise_scale, self.points[-1].noise_scale


class DecaySeries(_Strict):
    """Gains over weight decay, at one noise scale.

    Attributes:
        name: For people.
        described: The network and its training, in words.
        points: In the order of their decay.
    """

    name: str
    described: str
    points: tuple[Measured, ...]


class Evidence(_Strict):
    """All that was measured.

    Attributes:
        experiments: Curves in the noise scale.
        decays: Series in the weight decay.
    """

    experiments: tuple[Experiment, ...]
    decays: tuple[DecaySeries, ...]


@cache
def evidence() -> Evidence:
    """What the package carries."""
    text = files("isthmus.lab.noise").joinpath("evidence.json").read_text(encoding="utf-8")
    return Evidence.model_validate_json(text)


def gathered(results: Iterable[tuple[str, Mapping[str, Any]]]) -> Evidence:
    """The evidence in results of `isthmus lab noise`.

    Args:
        results: File names and contents of ``results.json``.
    """
    experiments, decays = [], []
    for file, content in results:
        for panel in content["panels"]:
            scales = {point["noise_scale"] for point in panel["points"]}
            if len(scales) > 1 and panel["optimum"] is not None:
                experiments.append(_experiment(file, content["experiment"], panel))
            plain = tuple(
                point for point in _points(panel) if not point.settings.get("augment", 0.0)
            )
            decay = {point.settings.get("weight_decay") for point in plain}
            if len(scales) == 1 and len(decay) > 1:
                plain = tuple(sorted(plain, key=lambda point: point.settings["weight_decay"]))
                settings = panel["points"][0]["settings"]
                decays.append(
                    DecaySeries(
                        name=panel["name"], described=_described("pairs", settings), points=plain
                    )
                )
    return Evidence(experiments=tuple(experiments), decays=tuple(decays))


def _points(panel: Mapping[str, Any]) -> tuple[Measured, ...]:
    figure = panel["figure"]
    return tuple(
        Measured(
            noise_scale=point["noise_scale"],
            gain=point["means"][figure],
            deviation=point["deviations"].get(figure, 0.0),
            accuracy=point["means"]["accuracy"],
            seeds=point["seeds"],
            settings={
                name: point["settings"][name] for name in _FIGURES if name in point["settings"]
            },
        )
        for point in panel["points"]
        if point["seeds"] and not point["diverged"]
    )


def _experiment(file: str, experiment: str, panel: Mapping[str, Any]) -> Experiment:
    # It loads torch, which reading the evidence does without.
    from isthmus.lab.noise.sizes import MINILM, parameters

    settings, figure = panel["points"][0]["settings"], panel["figure"]
    kind = {"noise-pair": "pairs", "noise-transfer": "transfer"}.get(experiment, "text")
    return Experiment(
        name=panel["name"],
        method="linear" if figure == "gain" else figure.removesuffix("_gain"),
        family="sgd" if settings.get("optimizer") == "sgd" else "adaptive",
        # MiniLM is always fine-tuned by AdamW.
        optimizer=settings.get("optimizer", "adamw"),
        network=_KINDS[settings["architecture"]] if "architecture" in settings else "transformer",
        split="pretrained" if kind != "pairs" else "trunk" if settings["shared"] else "start",
        described=_described(kind, settings),
        parameters=MINILM if kind == "text" else parameters(settings),
        epochs=settings["epochs"],
        command=f"isthmus lab noise {kind}",
        results=file,
        bandwidth=panel["bandwidths"]["noise_scale"],
        spread=panel["spreads"]["noise_scale"],
        optimum=Optimum(**{**panel["optimum"], "interval": tuple(panel["optimum"]["interval"])}),
        points=_points(panel),
        diverged=tuple(
            sorted(point["noise_scale"] for point in panel["points"] if point["diverged"])
        ),
    )


def _described(kind: str, settings: Mapping[str, Any]) -> str:
    if kind == "text":
        return f"MiniLM fine-tuned on {' and '.join(settings['tasks'])} by AdamW"
    network = (
        f"{_NAMES[settings['architecture']]} of width {settings['width']} and depth {settings['depth']}"
        f"{' with BatchNorm' if settings['architecture'] in _NORMALISED else ''}"
    )
    source = f" pretrained on {settings['source']}" if kind == "transfer" else ""
    tasks = {"same": ", the same task twice", "halves": ", one half of the classes each"}
    source += tasks.get(settings.get("tasks", ""), "")
    epochs = f"{settings['epochs']} {'epoch' if settings['epochs'] == 1 else 'epochs'}"
    return (
        f"{network}{source}, {settings['examples']} examples of {settings['data']}, "
        f"{epochs} of {_TRAINERS[settings['optimizer']]}"
    )
