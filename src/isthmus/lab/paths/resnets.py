"""Small residual networks on Fashion-MNIST: matched, with statistics of BatchNorm anew (REPAIR)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path as Folder
from typing import Any

import torch
from torch import Tensor

from isthmus.lab.data.pictures import Pictures
from isthmus.lab.networks.resnets import Normalisation, ResNet, learned, resnet_spec
from isthmus.lab.networks.state import seeded
from isthmus.lab.paths.joining import Label, joined
from isthmus.lab.paths.results import Joined
from isthmus.lab.paths.training import Pair, cross_entropy, fit, kept, shuffled, whole
from isthmus.models.activation_crosses import activation_crosses
from isthmus.models.batch_norm import reset_statistics
from isthmus.models.functional import NetworkFunction
from isthmus.paths.curves import Linear
from isthmus.paths.distance import relative_distance
from isthmus.paths.mixing import Parameters
from isthmus.paths.path import Path, grid
from isthmus.symmetry.activation_matching import match_activations
from isthmus.symmetry.matching import match_weights


@dataclass(frozen=True)
class ResNetSettings:
    """Sizes and training of the residual networks.

    Attributes:
        width: Channels of the first of three stages.
        blocks: Of each stage.
        normalisations: BatchNorm, and LayerNorm over all channels and places.
        pairs: Pairs of seeds.
        training: Pictures.
        test: Pictures.
        epochs: Of training.
        batch: Pictures of a step.
        rate: AdamW's highest learning rate.
        decay: Weight decay.
        points: Of the grid along a path.
        reset: Training pictures from which statistics of BatchNorm are measured at every point, and on
            which activations are matched.
    """

    width: int = 16
    blocks: int = 1
    normalisations: tuple[Normalisation, ...] = ("batch", "layer")
    pairs: tuple[tuple[int, int], ...] = ((0, 1), (2, 3), (4, 5))
    training: int = 10_000
    test: int = 2_000
    epochs: int = 3
    batch: int = 64
    rate: float = 3e-3
    decay: float = 1e-2
    points: int = 11
    reset: int = 2_000


def clothes(cache: Folder, training: int, test: int) -> tuple[Pair, Pair]:
    """The first pictures of Fashion-MNIST, [N, 1, 28, 28], of mean 0 and deviation 1.

    Raises:
        IsthmusError: `make data` was not run.
    """
    pictures = Pictures(cache / "data")

    def read(part: str, count: int) -> Pair:
        images = torch.tensor(pictures.array("fashion", part, "images")[:count])
        labels = torch.tensor(pictures.array("fashion", part, "labels")[:count].astype("int64"))
        return (images.float().unsqueeze(1) / 255 - 0.286) / 0.353, labels

    return read("train", training), read("test", test)


class _ResNets:
    def __init__(self, settings: ResNetSettings, cache: Folder) -> None:
        self.settings = settings
        self.cache = cache
        self.training, self.test = clothes(cache, settings.training, settings.test)
        # Of the training pictures as many as are held out.
        some = (self.training[0][: settings.test], self.training[1][: settings.test])
        self.data = {"train": whole(some, 500), "test": whole(self.test, 500)}
        reset = (self.training[0][: settings.reset], self.training[1][: settings.reset])
        self.reset = whole(reset, 500)

    def empty(self, kind: Normalisation) -> ResNet:
        return ResNet(self.settings.width, self.settings.blocks, kind).eval()

    def network(self, kind: Normalisation, seed: int) -> dict[str, Tensor]:
        settings = self.settings
        steps = settings.epochs * (settings.training // settings.batch)
        record = asdict(settings) | {"kind": kind, "seed": seed, "steps": steps}
        for apart in ("normalisations", "pairs", "test", "points", "reset"):
            del record[apart]

        def batches() -> Iterator[Pair]:
            return shuffled(self.training, settings.batch, seed)

        def train() -> torch.nn.Module:
            seeded(seed)
            made = self.empty(kind)
            adamw = torch.optim.AdamW(
                made.parameters(), lr=settings.rate, weight_decay=settings.decay
            )
            return fit(made, batches(), cross_entropy, [adamw], steps, warmup=50)

        return kept(self.cache / "lab-paths" / "resnet" / f"{kind}-seed-{seed}", record, train)

    def pair(self, kind: Normalisation, seeds: tuple[int, int]) -> list[Joined]:
        a, b = (self.network(kind, seed) for seed in seeds)
        module = self.empty(kind)
        spec = resnet_spec(module)
        function = NetworkFunction(module)
        part = learned(spec)
        matching = match_weights(
            part, *({name: each[name] for name in part.tensors} for each in (a, b))
        )
        crosses = activation_crosses(module, spec, a, b, self.reset, kind="correlation")
        moved = {
            "none": b,
            "weights": spec.act(matching.element, b),
            "activations": spec.act(match_activations(spec, crosses), b),
        }

        def anew(_t: float, parameters: Parameters) -> Mapping[str, Tensor]:
            return reset_statistics(module, parameters, self.reset)

        found = []
        for alignment, end in moved.items():
            for path, prepare in (("linear", None), ("linear, reset", anew)):
                if prepare is not None and kind != "batch":
                    continue
                found.append(
                    joined(
                        Path(Linear(), (a, end)),
                        function,
                        self.data,
                        grid(self.settings.points),
                        Label(f"{kind} norm", alignment, path, f"{seeds[0]}-{seeds[1]}"),
                        prepare=prepare,
                        figures={"distance": relative_distance(a, end)},
                    )
                )
        return found


def run_resnets(
    settings: ResNetSettings, cache: Folder, stage: Callable[[str], Any]
) -> tuple[dict[str, Any], list[Joined]]:
    """All pairs with each kind of norm.

    Args:
        settings: Sizes and training.
        cache: Where `make data` put its data, and where networks are kept.
        stage: A context that tells and times a stage.

    Raises:
        IsthmusError: `make data` was not run.
    """
    networks = _ResNets(settings, cache)
    found = []
    for kind in settings.normalisations:
        for seeds in settings.pairs:
            with stage(f"Pair {seeds[0]}-{seeds[1]}, {kind} norm"):
                found += networks.pair(kind, seeds)
    return asdict(settings), found
