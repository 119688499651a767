"""`isthmus lab two-layer`: small networks trained to interpolation, where they end, and what is connected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeAlias

import numpy as np

from isthmus.lab.grid import Grid
from isthmus.lab.machine import let_threads_sleep, torch_threads
from isthmus.lab.progress import Narrator
from isthmus.lab.results_file import write_results
from isthmus.two_layer.connecting import sufficient_width
from isthmus.two_layer.experiments import Trained, Training, connect_pairs, kinds, train_many
from isthmus.two_layer.network import BALLS, Data
from isthmus.two_layer.packing import cone_count
from isthmus.two_layer.patterns import patterns
from isthmus.two_layer.split import components, two_neuron_data, window
from isthmus.two_layer.walls import split_certificate

Name: TypeAlias = Literal["AdamW", "Signum", "Muon", "NGD"]


@dataclass(frozen=True)
class TwoLayerSettings:
    """What is trained.

    Attributes:
        seeds: Trainings a width and optimizer; all pairs of them are connected.
        widths: Of the networks.
        points: n of the random data in the plane.
        data_seed: Draws points and labels.
        radii: By optimizer 1/λ on the random data.
        split_seeds: Trainings on the two-neuron data an optimizer and λ.
        split_radii: By optimizer each 1/λ on the two-neuron data: one where its ball holds one kind of solution
            only, one where it holds both.
        steps: Of each training.
        tolerance: A training interpolates if its loss ½Σ(f − y)² is no more.
    """

    seeds: int = 8
    widths: tuple[int, ...] = (4, 6, 8, 10, 12, 16, 24, 32)
    points: int = 4
    data_seed: int = 0
    radii: dict[Name, float] = field(
        default_factory=lambda: {"AdamW": 1.25, "Signum": 1.25, "Muon": 2.5, "NGD": 3.0}
    )
    split_seeds: int = 100
    split_radii: dict[Name, tuple[float, ...]] = field(
        default_factory=lambda: {
            "AdamW": (1.08, 5.0),
            "Signum": (1.08, 5.0),
            "Muon": (1.65, 5.0),
            "NGD": (1.65, 5.0),
        }
    )
    steps: int = 3000
    tolerance: float = 1e-6

    def quick(self) -> TwoLayerSettings:
        """Fewer trainings: to see it run."""
        return replace(self, seeds=2, widths=(8, 32), split_seeds=3, steps=600, tolerance=1e-3)


def training(name: Name, radius: float, steps: int) -> Training:
    """An optimizer whose weight decay is 1/radius.

    Args:
        name: Which.
        radius: Of its ball.
        steps: Full-batch steps.
    """
    from torch import Tensor
    from torch.optim import AdamW, Optimizer

    from isthmus.optim.lion_k import Muon, NormalizedGD, Signum

    decay = 1 / radius

    def adamw(parameters: list[Tensor], lr: float) -> Optimizer:
        # With β₁ = β₂ both moments weigh gradients alike, so that |m| ≤ √v: the ball holds at every step.
        return AdamW(parameters, lr=lr, betas=(0.95, 0.95), weight_decay=decay, foreach=True)

    def signum(parameters: list[Tensor], lr: float) -> Optimizer:
        return Signum(parameters, lr=lr, weight_decay=decay)

    def muon(parameters: list[Tensor], lr: float) -> Optimizer:
        # The exact polar factor, unscaled: Newton–Schulz's is off by up to a third.
        return Muon(
            parameters,
            lr=lr,
            momentum=0.9,
            nesterov=False,
            weight_decay=decay,
            adjust="none",
            polar="svd",
        )

    def normalised(parameters: list[Tensor], lr: float) -> Optimizer:
        return NormalizedGD(parameters, lr=lr, weight_decay=decay)

    if name == "AdamW":
        return Training(name, "max", decay, adamw, steps=steps)
    if name == "Signum":
        return Training(name, "max", decay, signum, steps=steps)
    if name == "Muon":
        return Training(name, "operator", decay, muon, steps=steps)
    return Training(name, "frobenius", decay, normalised, steps=steps)


def run_two_layer(
    output: Path,
    *,
    quick: bool = False,
    settings: TwoLayerSettings | None = None,
    narrator: Narrator | None = None,
) -> dict[str, Any]:
    """Verify the certificate, train, connect, write ``results.json``, print two tables.

    Args:
        output: Folder to write to; made if it is missing.
        quick: Few trainings, to see it run.
        settings: Other ones.
        narrator: Shows the progress; on standard output by default.

    Returns:
        What was written.
    """
    chosen = settings or TwoLayerSettings()
    chosen = chosen.quick() if quick else chosen
    told = Narrator() if narrator is None else narrator
    output.mkdir(parents=True, exist_ok=True)
    let_threads_sleep()
    with torch_threads(1):
        with told.stage("two neurons, certificate"):
            split = _certificate()
        total = sum(map(len, chosen.split_radii.values()))
        with told.stage("two neurons, trainings", total) as advance:
            ends = _split_ends(chosen, advance)
        with told.stage("pairs over the width", len(chosen.radii) * len(chosen.widths)) as advance:
            pairs = _pairs(chosen, advance)
    results = {
        "settings": asdict(chosen),
        "split": split,
        "ends": ends,
        **pairs,
    }
    write_results(output / "results.json", results)
    for grid in (ends_table(results), pairs_table(results)):
        told.console.print(grid.table())
    told.say(f"The barrier of {split['barrier']} is proven: {split['verified']}")
    told.say(f"Results are in {output / 'results.json'}")
    return results


def _certificate() -> dict[str, Any]:
    data = two_neuron_data()
    certificate = split_certificate(data)
    return {
        "points": data.points.tolist(),
        "products": [component.product.tolist() for component in components(data)],
        "barrier": str(certificate.barrier),
        "verified": certificate.verify(),
        "windows": {ball: asdict(found) for ball in BALLS if (found := window(data, ball))},
    }


def _split_ends(settings: TwoLayerSettings, advance: Callable[[int], None]) -> list[dict[str, Any]]:
    data = two_neuron_data()
    rows = []
    for name, radii in settings.split_radii.items():
        for radius in radii:
            method = training(name, radius, settings.steps)
            ends = train_many(2, data, method, range(settings.split_seeds))
            found = kinds(ends, data, settings.tolerance)
            rows.append(
                {
                    "optimizer": name,
                    "ball": method.ball,
                    "radius": radius,
                    "weight decay": method.weight_decay,
                    "same": list(found["same"]),
                    "opposite": list(found["opposite"]),
                    "neither": list(found[None]),
                    "saturation": [one.saturation for one in ends],
                    "loss": [one.loss for one in ends],
                }
            )
            advance(1)
    return rows


def _pairs(settings: TwoLayerSettings, advance: Callable[[int], None]) -> dict[str, Any]:
    random = np.random.default_rng(settings.data_seed)
    data = Data.of(random.normal(size=(settings.points, 2)), random.normal(size=settings.points))
    found = patterns(data.points)
    rows = []
    for name, radius in settings.radii.items():
        for width in settings.widths:
            method = training(name, radius, settings.steps)
            ends = train_many(width, data, method, range(settings.seeds))
            pairs = connect_pairs(ends, data, method, settings.tolerance, found)
            bounds = [one.bound for one in pairs.connections if one.bound is not None]
            rows.append(
                {
                    "optimizer": name,
                    "ball": method.ball,
                    "radius": radius,
                    "width": width,
                    "trained": pairs.trained,
                    "fitted": pairs.fitted,
                    "pairs": len(pairs.connections),
                    "connected": pairs.fraction,
                    "needed": [one.needed for one in pairs.connections],
                    "cone count": _counts(ends, settings, method, found),
                    "largest loss": max((bound.loss for bound in bounds), default=None),
                    "largest norm": max(
                        (
                            one.bound.norm / size
                            for one, size in zip(pairs.connections, pairs.radius, strict=True)
                            if one.bound is not None
                        ),
                        default=None,
                    ),
                    "saturation": [one.saturation for one in ends],
                    "loss": [one.loss for one in ends],
                }
            )
            advance(1)
    return {
        "data": {"points": data.points.tolist(), "labels": data.labels.tolist()},
        "patterns": found.count,
        "patterns verified": found.verify(),
        "sufficient width": sufficient_width(found),
        "pairs": rows,
    }


def _counts(
    ends: tuple[Trained, ...], settings: TwoLayerSettings, method: Training, found: Any
) -> list[int] | None:
    if method.ball != "max":
        return None
    return [
        cone_count(one.network, found, max(method.radius, method.radius * one.saturation))
        for one in ends
        if one.loss <= settings.tolerance
    ]


def ends_table(results: dict[str, Any]) -> Grid:
    """Where the trainings on the two-neuron data ended."""
    rows = []
    for row in results["ends"]:
        solved = [
            saturation
            for saturation, loss in zip(row["saturation"], row["loss"], strict=True)
            if loss <= results["settings"]["tolerance"]
        ]
        rows.append(
            (
                row["optimizer"],
                f"{row['weight decay']:.4f}",
                f"{row['radius']:.2f}",
                str(len(row["same"])),
                str(len(row["opposite"])),
                str(len(row["neither"])),
                f"{max(row['saturation']):.4f}",
                f"{fmean(solved):.3f}" if solved else "",
            )
        )
    return Grid(
        "two neurons: trainings by where they end",
        (
            "optimizer",
            "λ",
            "1/λ",
            "same",
            "opposite",
            "none",
            "λ·norm, largest",
            "solutions, mean",
        ),
        tuple(rows),
    )


def pairs_table(results: dict[str, Any]) -> Grid:
    """Which pairs the construction connects, over the width."""
    rows = []
    for row in results["pairs"]:
        needed = [sum(one) for one in row["needed"]]
        rows.append(
            (
                row["optimizer"],
                str(row["width"]),
                f"{row['fitted']} of {row['trained']}",
                "" if row["connected"] is None else f"{row['connected']:.2f}",
                f"{fmean(needed):.1f}" if needed else "",
                f"{2 * fmean(row['cone count']):.1f}" if row["cone count"] else "",
                "" if row["largest loss"] is None else f"{row['largest loss']:.1e}",
                "" if row["largest norm"] is None else f"{row['largest norm']:.5f}",
                f"{max(row['saturation']):.4f}",
            )
        )
    return Grid(
        f"pairs over the width; 4P = {results['sufficient width']}",
        (
            "optimizer",
            "width",
            "fitted",
            "connected",
            "needed",
            "in cones",
            "loss ≤",
            "norm/R ≤",
            "λ·norm",
        ),
        tuple(rows),
    )
