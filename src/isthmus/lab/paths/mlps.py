"""MLPs on digits: barriers over the width, naive, matched in three ways, and along a learned bend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path as Folder
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.lab.networks.mlps import mlp, mlp_spec
from isthmus.lab.networks.state import seeded
from isthmus.lab.paths.joining import Label, joined
from isthmus.lab.paths.results import Joined
from isthmus.lab.paths.training import Pair, cross_entropy, fit, kept, shuffled, whole
from isthmus.models.activation_crosses import activation_crosses
from isthmus.models.functional import NetworkFunction
from isthmus.paths.bends import train_bends
from isthmus.paths.curves import Linear, PolygonalChain
from isthmus.paths.distance import relative_distance
from isthmus.paths.path import Path, grid
from isthmus.symmetry.activation_matching import match_activations
from isthmus.symmetry.learned import match_learned
from isthmus.symmetry.many import match_many
from isthmus.symmetry.matching import match_weights
from isthmus.symmetry.spec import Element, Spec

CLASSES, PIXELS = 10, 64


@dataclass(frozen=True)
class MlpSettings:
    """Sizes and training of the MLPs.

    Attributes:
        widths: Units of a hidden layer.
        hidden: Hidden layers.
        pairs: Pairs of seeds.
        epochs: Of training.
        batch: Examples of a step.
        rate: Adam's learning rate, constant.
        test: How many of the 1,797 digits are held out.
        points: Of the grid along a path.
        learned: Steps of learned matching, straight-through.
        learned_to: The largest width at which it is tried: every step solves an assignment for each layer.
        bend: Steps of training a bend.
        bend_rate: Adam's learning rate for it.
        many: How many networks are merged at once.
    """

    widths: tuple[int, ...] = (32, 64, 128, 256, 512)
    hidden: int = 3
    pairs: tuple[tuple[int, int], ...] = ((0, 1), (2, 3), (4, 5))
    epochs: int = 40
    batch: int = 64
    rate: float = 1e-3
    test: int = 360
    points: int = 25
    learned: int = 300
    learned_to: int = 128
    bend: int = 300
    bend_rate: float = 1e-3
    many: int = 4


def digits(test: int) -> tuple[Pair, Pair]:
    """The 8 x 8 digits of scikit-learn, 0 to 1, training and test."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    images = torch.from_numpy((x[order] / 16).astype(np.float32))
    labels = torch.from_numpy(y[order].astype(np.int64))
    return (images[test:], labels[test:]), (images[:test], labels[:test])


class Mlps:
    """Trained MLPs and their data.

    Args:
        settings: Sizes and training.
        cache: Where networks are kept.
    """

    def __init__(self, settings: MlpSettings, cache: Folder) -> None:
        self.settings = settings
        self.cache = cache
        self.training, self.test = digits(settings.test)
        self.data = {"train": whole(self.training), "test": whole(self.test)}

    def network(self, width: int, seed: int) -> dict[str, Tensor]:
        """The tensors of one MLP, trained now or before."""
        settings = self.settings
        steps = settings.epochs * (len(self.training[1]) // settings.batch)
        record = {
            "digits": settings.test,
            "width": width,
            "hidden": settings.hidden,
            "steps": steps,
            "batch": settings.batch,
            "rate": settings.rate,
            "seed": seed,
        }

        def train() -> torch.nn.Module:
            seeded(seed)
            made = mlp(PIXELS, width, settings.hidden, CLASSES)
            adam = torch.optim.Adam(made.parameters(), lr=settings.rate)
            batches = shuffled(self.training, settings.batch, seed)
            return fit(made, batches, cross_entropy, [adam], steps, cosine=False)

        return kept(self.cache / "lab-paths" / "mlp" / f"width-{width}-seed-{seed}", record, train)

    def function(self, width: int) -> NetworkFunction:
        """MLPs of a width as a function of their tensors."""
        return NetworkFunction(mlp(PIXELS, width, self.settings.hidden, CLASSES))

    def pair(self, width: int, seeds: tuple[int, int]) -> list[Joined]:
        """One pair, on every path."""
        settings = self.settings
        a, b = (self.network(width, seed) for seed in seeds)
        spec = mlp_spec(width, settings.hidden)
        function = self.function(width)
        start = perf_counter()
        weights = match_weights(spec, a, b)
        seconds = perf_counter() - start
        plain = mlp(PIXELS, width, settings.hidden, CLASSES)
        crosses = activation_crosses(plain, spec, a, b, whole(self.training), kind="correlation")
        moved = {
            "none": b,
            "weights": spec.act(weights.element, b),
            "activations": spec.act(match_activations(spec, crosses), b),
        }
        if width <= settings.learned_to:
            moved["learned"] = spec.act(self._learned(spec, function, a, b, weights.element), b)
        group, pair = f"width {width}", f"{seeds[0]}-{seeds[1]}"
        ts = grid(settings.points)
        found = [
            joined(
                Path(Linear(), (a, end)),
                function,
                self.data,
                ts,
                Label(group, name, "linear", pair),
                figures={"distance": relative_distance(a, end)}
                | ({"seconds": seconds} if name == "weights" else {}),
            )
            for name, end in moved.items()
        ]
        for name in ("none", "weights"):
            bent = self._bent(function, a, moved[name])
            found.append(
                joined(bent, function, self.data, ts, Label(group, name, "one bend", pair))
            )
        return found

    def _learned(
        self,
        spec: Spec,
        function: NetworkFunction,
        a: Mapping[str, Tensor],
        b: Mapping[str, Tensor],
        start: Element,
    ) -> Element:
        draw = shuffled(self.training, self.settings.batch, 0)
        return match_learned(
            spec,
            a,
            b,
            lambda parameters, _step: function.loss(parameters, next(draw)),
            start=start,
            steps=self.settings.learned,
            estimator="straight-through",
            evaluate=lambda parameters: function.evaluate(parameters, self.data["train"])["loss"],
        ).element

    def _bent(
        self, function: NetworkFunction, a: Mapping[str, Tensor], b: Mapping[str, Tensor]
    ) -> Path:
        draw = shuffled(self.training, self.settings.batch, 1)
        return train_bends(
            Path.straight(PolygonalChain(), a, b),
            lambda parameters, _step: function.loss(parameters, next(draw)),
            optimizer=lambda tensors: torch.optim.Adam(tensors, lr=self.settings.bend_rate),
            steps=self.settings.bend,
            generator=torch.Generator().manual_seed(0),
        ).path

    def several(self, width: int) -> list[Joined]:
        """The mean of several MLPs: as they are, moved to the first one, and through their Fréchet mean."""
        settings = self.settings
        models = [self.network(width, seed) for seed in range(settings.many)]
        spec = mlp_spec(width, settings.hidden)
        function = self.function(width)
        to_first = [models[0]] + [
            spec.act(match_weights(spec, models[0], other).element, other) for other in models[1:]
        ]
        start = perf_counter()
        matched = match_many(spec, models)
        seconds = perf_counter() - start
        common = [
            spec.act(element, model)
            for element, model in zip(matched.elements, models, strict=True)
        ]
        alone = [_figures(function, self.data, model) for model in models]
        ends = {f"{name} ends": sum(each[name] for each in alone) / len(alone) for name in alone[0]}
        found = []
        for alignment, those in (
            ("none", models),
            ("weights, to the first", to_first),
            ("weights, Fréchet mean", common),
        ):
            mean = _mean(those)
            figures = {
                f"{name} mean": value for name, value in _figures(function, self.data, mean).items()
            }
            extra: dict[str, float] = {"rest": _apart(those)}
            if alignment.endswith("Fréchet mean"):
                extra |= {"seconds": seconds, "converged": float(matched.converged)}
            found.append(
                Joined(
                    f"width {width}",
                    alignment,
                    f"mean of {len(models)}",
                    "all",
                    ends | figures | extra,
                )
            )
        return found


def _figures(
    function: NetworkFunction, data: Mapping[str, list[Pair]], model: Mapping[str, Tensor]
) -> dict[str, float]:
    return {
        f"{part} {name}": value
        for part, batches in data.items()
        for name, value in function.evaluate(model, batches).items()
    }


def _mean(models: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in models]).mean(dim=0) for name in models[0]}


def _apart(models: list[dict[str, Tensor]]) -> float:
    """The root mean square distance to the mean, relative to its norm."""
    mean = _mean(models)
    squares = [relative_distance(mean, each) ** 2 for each in models]
    return float((sum(squares) / len(squares)) ** 0.5)


def run_mlps(
    settings: MlpSettings, cache: Folder, stage: Callable[[str], Any]
) -> tuple[dict[str, Any], list[Joined]]:
    """All pairs of all widths.

    Args:
        settings: Sizes and training.
        cache: Where networks are kept.
        stage: A context that tells and times a stage.
    """
    mlps = Mlps(settings, cache)
    found = []
    for width in settings.widths:
        with stage(f"Width {width}"):
            for seeds in settings.pairs:
                found += mlps.pair(width, seeds)
    return asdict(settings), found


def run_many(
    settings: MlpSettings, cache: Folder, stage: Callable[[str], Any]
) -> tuple[dict[str, Any], list[Joined]]:
    """The mean of several networks, for every width; arguments as for `run_mlps`."""
    mlps = Mlps(settings, cache)
    found = []
    for width in settings.widths:
        with stage(f"Width {width}, {settings.many} networks"):
            found += mlps.several(width)
    return asdict(settings), found
