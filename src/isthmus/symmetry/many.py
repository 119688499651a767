"""Matching several networks at once: their mean modulo the groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.errors import SymmetryError
from isthmus.geometry.euclidean import Euclidean
from isthmus.geometry.frechet import frechet_mean, normalized
from isthmus.geometry.manifold import Logarithm
from isthmus.symmetry.balance import balance
from isthmus.symmetry.matching import match_weights
from isthmus.symmetry.pair import checked_pair
from isthmus.symmetry.spec import Element, Spec

_SETTLED = 1e-7


@dataclass(frozen=True)
class ManyMatching:
    """K networks in common coordinates.

    Attributes:
        mean: Σ w_k g_k x_k, in balanced coordinates near those of the most central network.
        elements: g_k, from each network as it is to those coordinates. g_j⁻¹ g_i moves network i to
            network j, and around any cycle these moves end where they began.
        distances: ‖mean − g_k x_k‖ over the norm of the mean, shape [K].
        functional: Half the mean square of the distances at the start and after every step; it falls.
        converged: No step changes the mean any more, and every alignment settled.
    """

    mean: dict[str, Tensor]
    elements: list[Element]
    distances: Tensor
    functional: list[float]
    converged: bool


def match_many(
    spec: Spec,
    models: Sequence[Mapping[str, Tensor]],
    *,
    weights: Sequence[float] | None = None,
    sweeps: int = 100,
    seed: int = 0,
    tolerance: float = _SETTLED,
    max_iterations: int = 100,
    progress: Callable[[int], None] | None = None,
) -> ManyMatching:
    """The Fréchet mean of networks on weight space modulo the groups.

    As for adapters: align every network to the mean, average, and repeat (`frechet_mean`), where the
    logarithm is alignment followed by subtraction. With permutations this is re-basin of
    several models to a common one. It starts at the network with the least squared distances to the
    others, so that the order of the networks does not matter, but for ties and for local optima of the
    alignments, which have no certificate.

    Args:
        spec: Where the groups act.
        models: K networks of one architecture, in memory; computed in float64.
        weights: K shares, not negative; equal if None.
        sweeps: As in `match_weights`, for every alignment.
        seed: Decides the orders of axes.
        tolerance: Largest gradient of the functional, relative to the norm of a network.
        max_iterations: Steps after which it gives up and warns.
        progress: Told of every round of alignments: its number.

    Raises:
        SymmetryError: There are no networks, or they do not fit the spec or each other.
        MethodError: Bad weights.
    """
    if not models:
        raise SymmetryError("There are no networks to match", "Give at least one.")
    for model in models:
        checked_pair(spec, models[0], model)
    frames = [balance(spec, model).element for model in models]
    layout = _Layout(models[0])
    points = [
        layout.flat(
            {name: spec.act_on(frame, name, model[name].to(torch.float64)) for name in layout.names}
        )
        for frame, model in zip(frames, models, strict=True)
    ]
    scale = math.sqrt(sum(float(x.square().sum()) for x in points) / len(points)) or 1.0
    orbits = _Orbits(spec, layout, sweeps, seed, progress)
    share = normalized(weights, len(models))
    scaled = [x / scale for x in points]
    found = frechet_mean(
        scaled,
        share,
        orbits,
        start=orbits.guess(torch.stack(scaled), share),
        tolerance=tolerance,
        max_iterations=max_iterations,
    )
    elements = orbits.aligned(found.mean, scaled)
    mean = layout.tensors(found.mean * scale)
    size = float(found.mean.norm()) or 1.0
    return ManyMatching(
        mean={
            name: mean[name].to(tensor) if name in mean else tensor
            for name, tensor in models[0].items()
        },
        elements=[
            {
                axis: group.compose(element[axis], frame[axis]) if axis in frame else element[axis]
                for axis, group in spec.axes.items()
            }
            for element, frame in zip(elements, frames, strict=True)
        ],
        distances=found.distances / size,
        functional=found.functional,
        converged=found.converged,
    )


class _Layout:
    """Where tensors lie in one vector."""

    def __init__(self, model: Mapping[str, Tensor]) -> None:
        self.shapes = {name: model[name].shape for name in model if model[name].is_floating_point()}
        self.names = list(self.shapes)
        self.size = sum(shape.numel() for shape in self.shapes.values())

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].reshape(-1) for name in self.names])

    def tensors(self, flat: Tensor) -> dict[str, Tensor]:
        parts = torch.split(flat, [shape.numel() for shape in self.shapes.values()])
        return {
            name: part.reshape(self.shapes[name])
            for name, part in zip(self.names, parts, strict=True)
        }


class _Orbits(Euclidean):
    """Weights modulo elements that keep norms: the logarithm aligns first.

    Alignments of the K points are remembered, and the next ones start there.
    """

    def __init__(
        self,
        spec: Spec,
        layout: _Layout,
        sweeps: int,
        seed: int,
        progress: Callable[[int], None] | None,
    ) -> None:
        super().__init__(layout.size)
        known = {name: spec.tensors[name] for name in layout.names}
        self.spec = Spec(spec.axes, known)
        self.layout = layout
        self.sweeps = sweeps
        self.seed = seed
        self.progress = progress
        self.rounds = 0
        self.last: list[Element] = []

    def __repr__(self) -> str:
        return f"weights modulo {len(self.spec.axes)} axes"

    def guess(self, points: Tensor, weights: Tensor) -> Tensor:
        """The point with the least Σ w d² to the others."""
        count = len(points)
        squares = torch.zeros(count, count, dtype=torch.float64)
        elements = [[self.spec.identity()] * count for _ in range(count)]
        for i in range(count):
            for j in range(i):
                elements[i][j], squares[i, j] = self._aligned(points[i], points[j], None)[:2]
                elements[j][i], squares[j, i] = self.spec.inverse(elements[i][j]), squares[i, j]
        center = int((squares @ weights).argmin())
        self.last = elements[center]
        return points[center]

    def aligned(self, x: Tensor, points: Sequence[Tensor]) -> list[Element]:
        """The element that moves each of the K points next to x."""
        starts: Sequence[Element | None] = self.last or [None] * len(points)
        return [self._aligned(x, y, g)[0] for y, g in zip(points, starts, strict=True)]

    def _logarithm(self, x: Tensor, y: Tensor) -> Logarithm[Tensor]:
        """Towards K points, whose alignments are remembered, and one more."""
        self.rounds += 1
        if self.progress is not None:
            self.progress(self.rounds)
        starts = [*self.last, self.spec.identity()]
        found = [self._aligned(x, one, g) for one, g in zip(y, starts, strict=True)]
        self.last = [element for element, _, _ in found[:-1]]
        moved = [self._moved(g, one) - x for (g, _, _), one in zip(found, y, strict=True)]
        settled = torch.tensor([converged for _, _, converged in found])
        length = torch.tensor([square for _, square, _ in found], dtype=torch.float64).sqrt()
        return Logarithm(
            tangent=torch.stack(moved),
            length=length,
            residual=torch.zeros_like(length),
            iterations=torch.ones_like(length, dtype=torch.int64),
            converged=settled,
            certified=torch.zeros_like(settled),
        )

    def _moved(self, element: Element, point: Tensor) -> Tensor:
        return self.layout.flat(self.spec.act(element, self.layout.tensors(point)))

    def _aligned(self, x: Tensor, y: Tensor, start: Element | None) -> tuple[Element, float, bool]:
        """The element, the squared distance after it, and whether the search settled."""
        match = match_weights(
            self.spec,
            self.layout.tensors(x),
            self.layout.tensors(y),
            start=start,
            sweeps=self.sweeps,
            seed=self.seed,
            balanced=False,
        )
        moved = self._moved(match.element, y)
        return match.element, float((moved - x).square().sum()), match.converged
