"""Paths between small GPT-2s of AdamW and of Muon: barriers in and out of distribution, spectra on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, pairwise
from pathlib import Path as Folder
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from isthmus.lab.paths.gpt2 import (
    LanguageTraining,
    OptimizerName,
    Texts,
    batches,
    configuration,
    model,
    network,
    texts,
)
from isthmus.lab.paths.joining import Label, joined
from isthmus.lab.paths.results import Joined
from isthmus.models.functional import NetworkFunction
from isthmus.paths.bends import train_bends
from isthmus.paths.curves import Linear, PolygonalChain
from isthmus.paths.distance import relative_distance
from isthmus.paths.path import Path, grid
from isthmus.paths.spectra import spectra_along
from isthmus.symmetry.architectures import architecture_of
from isthmus.symmetry.matching import match_weights
from isthmus.symmetry.normal_forms import absorb_norms

NAMES: dict[OptimizerName, str] = {"adamw": "AdamW", "muon": "Muon"}


@dataclass(frozen=True)
class LanguagePaths:
    """What decides the numbers.

    Attributes:
        training: Of the models.
        seeds: One model each of AdamW and of Muon.
        points: Of the grid along a path.
        own: Held-out examples of the genre that models are trained on.
        others: Examples of every other genre.
        bend: Steps of training a bend.
        bend_batch: Examples of a step.
        bend_rate: AdamW's highest learning rate for it.
    """

    training: LanguageTraining = field(default_factory=LanguageTraining)
    seeds: tuple[int, ...] = (0, 1, 2)
    points: int = 9
    own: int = 128
    others: int = 64
    bend: int = 150
    bend_batch: int = 16
    bend_rate: float = 1e-3

    def quick(self) -> LanguagePaths:
        """Tiny models, to see it run."""
        small = replace(
            self.training,
            width=32,
            layers=2,
            heads=2,
            vocabulary=512,
            context=32,
            steps=20,
            warmup=5,
            characters=200_000,
            held_out=20_000,
        )
        return replace(
            self, training=small, seeds=(0, 1), points=5, own=16, others=8, bend=10, bend_batch=8
        )


class _Languages:
    def __init__(self, settings: LanguagePaths, cache: Folder) -> None:
        self.settings = settings
        self.cache = cache
        self.read: Texts = texts(cache / "data", settings.training)
        self.tied = network(settings.training).eval()
        self.untied = network(settings.training, tied=False).eval()
        self.data = {
            "own" if genre == self.read.genre else genre: self._batches(
                rows[: settings.own if genre == self.read.genre else settings.others]
            )
            for genre, rows in self.read.held_out.items()
        }

    def _batches(self, rows: Tensor) -> list[Mapping[str, Tensor]]:
        return [{"input_ids": part} for part in torch.split(rows, 32)]

    def tensors(self, optimizer: OptimizerName, seed: int) -> dict[str, Tensor]:
        place = self.cache / "lab-paths" / "gpt2"
        return model(self.read, self.settings.training, optimizer, seed, place)

    def pair(
        self, one: tuple[OptimizerName, int], other: tuple[OptimizerName, int]
    ) -> Iterator[Joined]:
        """A pair on all paths."""
        settings = self.settings
        a, b = self.tensors(*one), self.tensors(*other)
        kinds = sorted((one[0], other[0]))
        group = f"{NAMES[kinds[0]]} and {NAMES[kinds[1]]}"
        pair = f"{NAMES[one[0]]} {one[1]}, {NAMES[other[0]]} {other[1]}"
        tied = NetworkFunction(self.tied)
        config = configuration(settings.training)
        ts = grid(settings.points)

        shapes = {name: tuple(tensor.shape) for name, tensor in a.items()}
        permutations = architecture_of(config, shapes).spec
        matched = match_weights(permutations, a, b)
        for alignment, end in (("none", b), ("permutations", permutations.act(matched.element, b))):
            yield joined(
                Path(Linear(), (a, end)),
                tied,
                self.data,
                ts,
                Label(group, alignment, "linear", pair),
                figures={"distance": relative_distance(a, end)},
            )

        absorbed = [absorb_norms(config, each) for each in (a, b)]
        first, second = (each.parameters for each in absorbed)
        spec = absorbed[0].architecture.spec
        start = perf_counter()
        turned = match_weights(spec, first, second)
        seconds = perf_counter() - start
        end = spec.act(turned.element, second)
        function = NetworkFunction(self.untied)
        figures = {"distance": turned.distance, "before": turned.before, "seconds": seconds}
        straight = Path(Linear(), (first, end))
        bent = self._bent(function, first, end)
        for path, kind in ((straight, "linear"), (bent, "one bend")):
            found = joined(
                path,
                function,
                self.data,
                ts,
                Label(group, "orthogonal", kind, pair),
                figures=figures,
            )
            yield self._with_spectra(found, path)

    def _bent(
        self, function: NetworkFunction, a: Mapping[str, Tensor], b: Mapping[str, Tensor]
    ) -> Path:
        draw = batches(self.read.training, self.settings.bend_batch, 12345)
        steps = self.settings.bend
        return train_bends(
            Path.straight(PolygonalChain(), a, b),
            lambda parameters, _step: function.loss(parameters, next(draw)),
            optimizer=lambda tensors: torch.optim.AdamW(
                tensors, lr=self.settings.bend_rate, weight_decay=0.0
            ),
            steps=steps,
            schedule=lambda step: min(1.0, (step + 1) / 10) * (1 - step / steps),
            generator=torch.Generator().manual_seed(0),
        ).path

    def _with_spectra(self, found: Joined, path: Path) -> Joined:
        """The means over all matrices of blocks of what their singular values say, at every t."""
        names = [
            name for name in path.points[0] if ".h." in name and path.points[0][name].ndim == 2
        ]
        spectra = spectra_along(path, found.ts, names, decay=self.settings.training.decay)
        curves = {
            figure.replace("_", " "): tuple(spectra.series(figure))
            for figure in (
                "stable_rank",
                "effective_rank",
                "tail_mass",
                "operator_norm",
                "max_norm",
            )
        }
        ranks = curves["stable rank"]
        steps = [other - one for one, other in pairwise(ranks)]
        monotone = all(step >= 0 for step in steps) or all(step <= 0 for step in steps)
        figures = {
            "stable rank first": ranks[0],
            "stable rank last": ranks[-1],
            "stable rank monotone": float(monotone),
        }
        return replace(
            found, figures={**found.figures, **figures}, curves={**found.curves, **curves}
        )


def run_gpt2(
    settings: LanguagePaths, cache: Folder, stage: Callable[[str], Any]
) -> tuple[dict[str, Any], list[Joined]]:
    """Pairs of one optimizer, and of both with different seeds.

    Args:
        settings: Sizes, training, seeds.
        cache: Where `make data` put its data, and where models are kept.
        stage: A context that tells and times a stage.

    Raises:
        IsthmusError: `make data` was not run.
    """
    with stage("Texts and tokenizer"):
        languages = _Languages(settings, cache)
    for optimizer in NAMES:
        for seed in settings.seeds:
            with stage(f"{NAMES[optimizer]}, seed {seed}"):
                languages.tensors(optimizer, seed)
    found: list[Joined] = []
    for one, other in _pairs(settings.seeds):
        with stage(f"{NAMES[one[0]]} {one[1]} to {NAMES[other[0]]} {other[1]}"):
            found += languages.pair(one, other)
    return asdict(settings), found


def _pairs(
    seeds: tuple[int, ...],
) -> Iterator[tuple[tuple[OptimizerName, int], tuple[OptimizerName, int]]]:
    """Round by round one pair of each sort, so that a run that is cut short has some of all."""
    for one, other in combinations(seeds, 2):
        yield ("adamw", one), ("adamw", other)
        yield ("muon", one), ("muon", other)
        yield ("adamw", one), ("muon", other)
