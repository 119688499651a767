"""A path between two networks, evaluated on several data sets at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.lab.paths.results import Joined
from isthmus.models.functional import NetworkFunction
from isthmus.paths.barriers import barrier
from isthmus.paths.mixing import Parameters
from isthmus.paths.path import Path
from isthmus.paths.profile import Prepare, profile

DataSets = Mapping[str, Sequence[Any]]
"""By name, batches."""


@dataclass(frozen=True)
class Label:
    """Which line of a table a path belongs to; see `Joined`."""

    group: str
    alignment: str
    path: str
    pair: str


def joined(
    path: Path,
    function: NetworkFunction,
    data: DataSets,
    ts: Sequence[float],
    label: Label,
    *,
    prepare: Prepare | None = None,
    figures: Mapping[str, float] | None = None,
) -> Joined:
    """Loss and accuracy on every data set along a path, and the barriers of the losses.

    Figures: ``NAME barrier`` (kind (b)) and ``NAME interior`` (the largest excess strictly between the
    ends, which may be negative) for each data set, ``NAME ends`` and ``NAME middle`` (losses at the ends, their mean,
    and at t = ½), and ``NAME accuracy ends`` and ``NAME accuracy middle`` where there is an accuracy.

    Args:
        path: Its ends are the networks.
        function: The network.
        data: What it is evaluated on.
        ts: The grid; it has ½.
        label: What the result is called.
        prepare: Gives the tensors that are evaluated at t, such as with statistics of BatchNorm anew.
        figures: More of them.
    """

    def evaluate(parameters: Parameters) -> dict[str, float]:
        return {
            f"{name} {figure}": value
            for name, batches in data.items()
            for figure, value in function.evaluate(parameters, batches).items()
        }

    found = profile(path, evaluate, ts, prepare=prepare)
    middle = list(found.ts).index(0.5)
    gathered = dict(figures or {})
    for name in data:
        losses = found.values[f"{name} loss"]
        excess = barrier(losses, found.ts)
        gathered |= {
            f"{name} barrier": excess.value,
            f"{name} interior": excess.interior,
            f"{name} ends": (losses[0] + losses[-1]) / 2,
            f"{name} middle": losses[middle],
        }
        if f"{name} accuracy" in found.values:
            rates = found.values[f"{name} accuracy"]
            gathered |= {
                f"{name} accuracy ends": (rates[0] + rates[-1]) / 2,
                f"{name} accuracy middle": rates[middle],
            }
    return Joined(
        label.group, label.alignment, label.path, label.pair, gathered, found.ts, found.values
    )
