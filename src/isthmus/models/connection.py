"""Two checkpoints of one architecture, aligned and joined by a path, and what happens along it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from isthmus.checkpoints import Checkpoint
from isthmus.errors import PathError, SymmetryError
from isthmus.models.alignment import named_alike
from isthmus.models.checkpoint_tensors import CheckpointTensors, by_parameter, symmetries
from isthmus.models.functional import NetworkFunction
from isthmus.models.matched import Batch, Draw, Told, matched
from isthmus.models.network import empty_network
from isthmus.models.widened_view import at_width_of
from isthmus.paths.barriers import Barrier, barrier
from isthmus.paths.bends import Step, train_bends
from isthmus.paths.curvature import curvature
from isthmus.paths.curves import Bezier, Linear, PolygonalChain
from isthmus.paths.distance import relative_distance
from isthmus.paths.path import Path, grid
from isthmus.paths.plane import Plane, frame, landscape
from isthmus.paths.profile import Profile, profile
from isthmus.paths.spectra import Spectra, spectra_along
from isthmus.symmetry.spec import Spec

Shape = Literal["linear", "polychain", "bezier"]
AlignBy = Literal["none", "weights", "activations", "learned"]
Residual = Literal["auto", "none", "permutation", "signed"]

CONNECTED, NEARLY = 0.02, 0.2
"""Barriers (b), as shares of the mean loss of the ends, below which two models are called connected or
nearly so."""

_BLOCK = re.compile(r"^(.*?\.)?(\d+)\.")
_SEEDS = 2**40
_SPECTRA = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class ConnectSettings:
    """What is asked for.

    Attributes:
        path: A straight line, a polygonal chain, or a Bézier curve.
        align: How b is moved next to a first.
        residual: The group of the residual stream.
        bends: Of the chain or the curve.
        steps: Of training them.
        rate: Adam's learning rate for that; it falls to 0.
        points: Of the grid from t = 0 to 1.
        learned: Steps of learned alignment.
        plane: Points along each side of the landscape; 0 for none.
        curvature: Whether to take it at t = 0, ½ and 1.
        seed: Decides orders, batches and t's.
    """

    path: Shape = "linear"
    align: AlignBy = "weights"
    residual: Residual = "auto"
    bends: int = 1
    steps: int = 200
    rate: float = 1e-3
    points: int = 25
    learned: int = 100
    plane: int = 0
    curvature: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.path != "linear" and self.bends < 1:
            raise PathError(
                f"A bent path has at least one bend, not {self.bends}",
                "Give one or more, or take the straight line.",
            )
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise PathError(f"A learning rate of {self.rate} trains nothing", "Give one above 0.")
        if not 0 <= self.seed < _SEEDS:
            raise PathError(f"There is no seed {self.seed}", f"Seeds are from 0 to {_SEEDS - 1}.")


@dataclass(frozen=True)
class Walk:
    """A path that was evaluated.

    Attributes:
        name: ``linear``, ``polychain`` or ``bezier``.
        profile: Held-out loss and accuracy for every t.
        a: Barrier of kind (a).
        b: Barrier of kind (b).
    """

    name: str
    profile: Profile
    a: Barrier
    b: Barrier


@dataclass(frozen=True)
class Connection:
    """What was found between two models.

    Attributes:
        settings: What was asked for.
        before: ‖a − b‖ / ‖a‖.
        distance: The same after alignment.
        walks: The straight line, and the bent path if one was asked for.
        spectra: Of matrices of the first, the middle and the last block along the last of them.
        curvature: By t the largest eigenvalue and the trace of the Hessian of the held-out loss.
        plane: Loss on the plane through both ends and the bend: xs, ys, rows of losses, corners.
        training: Examples that bends and alignment saw.
        held_out: Examples that all figures are from.
    """

    settings: ConnectSettings
    before: float
    distance: float
    walks: tuple[Walk, ...]
    spectra: Spectra
    curvature: Mapping[float, tuple[float, float]]
    plane: Mapping[str, Any] | None
    training: int
    held_out: int

    @property
    def share(self) -> float:
        """The barrier (b) of the last path, as a share of the mean loss of its ends."""
        losses = self.walks[-1].profile.values["loss"]
        ends = (losses[0] + losses[-1]) / 2
        return self.walks[-1].b.value / ends if ends else self.walks[-1].b.value

    @property
    def verdict(self) -> str:
        """In words."""
        last = self.walks[-1]
        rise = (
            f"along the {_WORDS[last.name]} the held-out loss rises by at most {last.b.value:.4g} above the "
            f"line between its ends, {self.share:.1%} of theirs"
        )
        if self.share < CONNECTED:
            return f"connected: {rise} (below {CONNECTED:.0%})"
        if self.share < NEARLY:
            return f"nearly connected: {rise} (below {NEARLY:.0%})"
        return f"separated: {rise}"


_WORDS = {"linear": "straight line", "polychain": "bent path", "bezier": "Bézier curve"}


def split(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Every other example of each batch for training, the others to judge on.

    Raises:
        PathError: Fewer than two examples.
    """
    parts: tuple[list[Batch], list[Batch]] = ([], [])
    turn = 0
    for batch in batches:
        count = len(next(iter(batch.values())))
        for number, part in enumerate(parts):
            rows = torch.arange((number + turn) % 2, count, 2)
            if len(rows):
                part.append({name: values[rows] for name, values in batch.items()})
        turn += count
    if not parts[0] or not parts[1]:
        raise PathError(
            "There is one example or none, and some must be held out",
            "Give a file with more texts.",
        )
    return parts


def connect_models(
    a: Checkpoint,
    b: Checkpoint,
    batches: Sequence[Batch],
    settings: ConnectSettings,
    *,
    state: dict[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None,
    told: Told = lambda _what, _done, _total: None,
) -> Connection:
    """Align b to a, lay a path, train its bends, and evaluate it on held-out examples.

    Both models are in memory, in float32, and each bend as another one.

    Args:
        a: A causal language model.
        b: Another of the same architecture.
        batches: Of tokens; every other example trains, the others judge.
        settings: What is asked for.
        state: Of an interrupted training of the bends.
        keep: Given that state from time to time.
        told: Told of progress.

    Raises:
        SymmetryError: The models differ in architecture, or their symmetries are not known.
        PathError: They are no causal language models, a loss is not finite, there is no data, or no bends.
        CalibrationError: Transformers cannot build the network.
    """
    training, held_out = split(batches)
    b = at_width_of(b, a, settings.residual)
    names = named_alike(a, b)
    network = empty_network(a)
    function = NetworkFunction(network)
    if not function.next_token:
        raise PathError(
            f"{a.label} is a {type(network).__name__}, and without labels only causal language models have a loss",
            "In Python, isthmus.paths takes any loss.",
        )
    stored = by_parameter(network, a)
    first = dict(CheckpointTensors(a, stored))
    second = dict(CheckpointTensors(b, {here: names[name] for here, name in stored.items()}))
    before = relative_distance(first, second)
    if settings.align != "none":
        spec = symmetries(a, settings.residual).spec
        named = Spec(
            spec.axes, {here: spec.tensors[name] for here, name in stored.items()}, spec.sites
        )
        matching = matched(
            settings.align,
            network,
            named,
            first,
            second,
            training,
            steps=settings.learned,
            seed=settings.seed,
            told=told,
        )
        second = named.act(matching.element, second)
    walks, path = [], Path(Linear(), (first, second))
    ts = grid(settings.points)
    walks.append(_walk("linear", path, function, held_out, ts, told))
    if settings.path != "linear":
        path = _bent(function, first, second, training, settings, state, keep, told)
        walks.append(_walk(settings.path, path, function, held_out, ts, told))
    curved = {}
    if settings.curvature:
        for number, t in enumerate((0.0, 0.5, 1.0)):
            told("curvature", number, 3)
            generator = torch.Generator().manual_seed(settings.seed)
            found = curvature(function.summed_loss, path.at(t), held_out, generator=generator)
            curved[t] = (found.top, found.trace)
    return Connection(
        settings=settings,
        before=before,
        distance=relative_distance(first, second),
        walks=tuple(walks),
        spectra=spectra_along(path, _SPECTRA, _chosen(first)),
        curvature=curved,
        plane=_plane(path, function, held_out, settings, told) if settings.plane else None,
        training=sum(len(batch["input_ids"]) for batch in training),
        held_out=sum(len(batch["input_ids"]) for batch in held_out),
    )


def _bent(
    function: NetworkFunction,
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    training: Sequence[Batch],
    settings: ConnectSettings,
    state: dict[str, Any] | None,
    keep: Callable[[dict[str, Any]], None] | None,
    told: Told,
) -> Path:
    curve = (PolygonalChain if settings.path == "polychain" else Bezier)(settings.bends)
    draw = Draw(training, settings.seed)

    def report(step: Step) -> None:
        told(f"training the bend, loss {step.loss:.3f}", step.number + 1, settings.steps)

    return train_bends(
        Path.straight(curve, a, b),
        lambda parameters, step: function.loss(parameters, draw(step)),
        optimizer=lambda tensors: torch.optim.Adam(tensors, lr=settings.rate),
        steps=settings.steps,
        generator=torch.Generator().manual_seed(settings.seed),
        schedule=lambda step: 1 - step / settings.steps,
        trained=[name for name in function.trainable if name in a],
        state=state,
        report=report,
        keep=keep,
        keep_every=20,
    ).path


def _walk(
    name: str,
    path: Path,
    function: NetworkFunction,
    held_out: Sequence[Batch],
    ts: Sequence[float],
    told: Told,
) -> Walk:
    found = profile(
        path,
        lambda parameters: function.evaluate(parameters, held_out),
        ts,
        progress=lambda done, total: told(f"walking the {_WORDS[name]}", done, total),
    )
    losses = found.values["loss"]
    return Walk(name, found, barrier(losses, found.ts, "a"), barrier(losses, found.ts, "b"))


def _plane(
    path: Path,
    function: NetworkFunction,
    held_out: Sequence[Batch],
    settings: ConnectSettings,
    told: Told,
) -> dict[str, Any]:
    if not path.bends:
        raise PathError(
            "A plane goes through three models, and a straight line has two",
            "Take a path with a bend: --path polychain.",
        )
    plane = Plane(path.points[0], path.points[-1], path.bends[0])
    xs, ys = frame(plane, settings.plane)
    found = landscape(
        plane,
        lambda parameters: function.evaluate(parameters, held_out),
        xs,
        ys,
        progress=lambda done, total: told("the plane", done, total),
    )
    return {
        "xs": list(xs),
        "ys": list(ys),
        "loss": found.values["loss"].tolist(),
        "corners": [list(corner) for corner in plane.corners],
    }


def _chosen(tensors: Mapping[str, Tensor]) -> list[str]:
    """The matrices of the first, the middle and the last block."""
    blocks: dict[tuple[str, int], list[str]] = {}
    for name, tensor in tensors.items():
        found = _BLOCK.match(name)
        if found and tensor.ndim == 2:
            blocks.setdefault((found[1] or "", int(found[2])), []).append(name)
    if not blocks:
        raise SymmetryError(
            "No matrix of a block was found, whose spectrum could be taken",
            "Take a network with numbered blocks.",
        )
    order = sorted(blocks)
    chosen = dict.fromkeys((order[0], order[len(order) // 2], order[-1]))
    return [name for block in chosen for name in blocks[block]]
