"""The equilibrium of weights before BatchNorm, predicted and measured: writes benchmarks/results/equilibrium.json.

Run: python benchmarks/equilibrium.py, after `make data`; about five minutes on one core.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch

from isthmus.lab.data.named import Data
from isthmus.lab.machine import environment, torch_threads
from isthmus.lab.networks.state import seeded
from isthmus.lab.noise.data import noise_data
from isthmus.lab.noise.networks import made_network, scale_invariant
from isthmus.lab.noise.settings import TrainingSettings
from isthmus.lab.noise.training import mean_loss
from isthmus.optim.noise_scale import effective_learning_rate, equilibrium

SETTINGS = [
    (lr, decay, momentum)
    for lr, decay in ((0.03, 0.03), (0.1, 0.01), (0.1, 0.03), (0.3, 0.01))
    for momentum in (0.0, 0.9)
]
BATCH = 64
REST = 4.0
"""A training is as many times 1/(ηλ) steps long; the last half is measured."""


@dataclass(frozen=True)
class Weight:
    """Means over the measured steps, of one weight.

    Attributes:
        squared_norm: ‖w‖².
        squared_gradient: ‖g‖²‖w‖², what the prediction is given.
        angle: Between w before and after a step, radians, root mean square.
    """

    name: str
    squared_norm: float
    squared_gradient: float
    angle: float


def batches(data: Data, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        for chosen in torch.randperm(len(data.targets), generator=generator).split(BATCH):
            if len(chosen) == BATCH:
                yield data.inputs[chosen], data.targets[chosen]


def measured(data: Data, lr: float, decay: float, momentum: float) -> list[Weight]:
    seeded(0)
    network = made_network(FOR, data)
    watched = scale_invariant(network)
    own = {id(weight) for weight in watched.values()}
    rest = [weight for weight in network.parameters() if id(weight) not in own]
    # Decay of gains and of the head would still the gradient.
    optimizer = torch.optim.SGD(
        [{"params": list(watched.values()), "weight_decay": decay}, {"params": rest}],
        lr,
        momentum=momentum,
    )
    steps = math.ceil(REST * max(1 / (lr * decay), 100))
    sums = {name: [0.0, 0.0, 0.0] for name in watched}
    count = 0
    for step, batch in zip(range(steps), batches(data, 1), strict=False):
        optimizer.zero_grad()
        mean_loss(network, batch).backward()
        before = {name: weight.detach().double().clone() for name, weight in watched.items()}
        gradients = {
            name: float(weight.grad.double().square().sum()) for name, weight in watched.items()
        }
        optimizer.step()
        if step < steps // 2:
            continue
        count += 1
        for name, weight in watched.items():
            old, new = before[name].flatten(), weight.detach().double().flatten()
            square = float(old @ old)
            # From the chord, as a cosine near 1 has lost its digits.
            chord = float((old / old.norm() - new / new.norm()).norm())
            sums[name][0] += square
            sums[name][1] += gradients[name] * square
            sums[name][2] += (2 * math.asin(chord / 2)) ** 2
    return [
        Weight(name, square / count, gradient / count, math.sqrt(angle / count))
        for name, (square, gradient, angle) in sums.items()
    ]


def compared(data: Data, lr: float, decay: float, momentum: float) -> dict[str, object]:
    rows = []
    for weight in measured(data, lr, decay, momentum):
        predicted = equilibrium(lr, decay, momentum, squared_gradient=weight.squared_gradient)
        rows.append(
            {
                **asdict(weight),
                "predicted_squared_norm": predicted.squared_norm,
                "predicted_angle": predicted.angle,
                "effective_lr": effective_learning_rate(lr, weight.squared_norm, momentum),
                "predicted_effective_lr": predicted.effective_lr,
            }
        )
    found = {"lr": lr, "weight_decay": decay, "momentum": momentum, "weights": rows}
    for name in ("effective_lr", "angle"):
        ratios = [row[name] / row[f"predicted_{name}"] for row in rows]
        found[f"{name}_ratio"] = {"mean": fmean(ratios), "least": min(ratios), "most": max(ratios)}
    print({key: value for key, value in found.items() if key != "weights"}, flush=True)
    return found


FOR = TrainingSettings(
    architecture="resnet", data="fashion-mnist", pool=2, width=8, depth=1, examples=3000, test=1000
)

if __name__ == "__main__":
    with torch_threads(1):
        given = noise_data(FOR, Path(".cache"))
        results = {
            "environment": environment(threads=1),
            "batch": BATCH,
            "settings": [compared(given, *each) for each in SETTINGS],
        }
    Path(__file__).with_name("results").joinpath("equilibrium.json").write_text(
        json.dumps(results, indent=1) + "\n", encoding="utf-8"
    )
