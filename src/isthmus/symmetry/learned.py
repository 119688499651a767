"""Matching by the loss between two networks, through gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from isthmus.errors import SymmetryError
from isthmus.symmetry.group import Crosses, Group
from isthmus.symmetry.matrix_groups import times
from isthmus.symmetry.monomial import Monomial
from isthmus.symmetry.pair import Pair
from isthmus.symmetry.spec import Element, Spec, rows_of

Estimator = Literal["straight-through", "sinkhorn"]

PathLoss = Callable[[Mapping[str, Tensor], int], Tensor]
"""The loss of parameters at a step, which may choose the batch."""

_MOMENTUM = 0.9
_SINKHORN_SWEEPS = 30
_START_MASS = 0.9


@dataclass(frozen=True)
class LearnedMatching:
    """An element after which the loss between a and g b is low.

    Attributes:
        element: g, on all axes: the best of those that were evaluated.
        distance: ‖a − g b‖ / ‖a‖ over all floating-point tensors.
        before: ‖a − b‖ / ‖a‖.
        losses: What was evaluated, by step; 0 is the start.
        step: That of the element.
    """

    element: Element
    distance: float
    before: float
    losses: dict[int, float]
    step: int


def match_learned(
    spec: Spec,
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    loss: PathLoss,
    *,
    start: Element | None = None,
    steps: int = 100,
    estimator: Estimator = "sinkhorn",
    evaluate: Callable[[Mapping[str, Tensor]], float] | None = None,
    every: int = 10,
    axes: Collection[str] | None = None,
    learning_rate: float = 0.1,
    seed: int = 0,
    progress: Callable[[int, float], None] | None = None,
) -> LearnedMatching:
    """The element with the lowest loss on the line from a to g b.

    For every axis and role a free matrix F is trained. ``straight-through``: F begins as the cross of
    the weights, the network sees the group element next to F, and the gradient goes to F as if it had
    seen F (Bengio, Léonard and Courville 2013, arXiv 1308.3432). That is the straight-through matching of
    Ainsworth, Hayase and Srinivasa (2023, Git Re-Basin, arXiv 2209.04836), whose free weights enter
    through their cross with b alone; it jumps from element to element. ``sinkhorn``: permutations are
    softened to doubly stochastic matrices (Peña et al. 2023, Re-basin via implicit Sinkhorn
    differentiation, arXiv 2212.12042; here differentiated through the sweeps); other groups stay
    straight-through. Each step takes the loss at one t, uniform in [0, 1], of (1 − t) a + t g b in
    a's own coordinates. Whatever the estimator, true elements are evaluated and returned.

    Args:
        spec: Where the groups act.
        a: Tensors of the network that stays, in memory.
        b: Tensors of the one that moves.
        loss: Differentiable loss of a network's floating-point and other tensors.
        start: Where to begin, best a match by weights; the identity if None.
        steps: Gradient steps.
        estimator: See above.
        evaluate: What decides which element is best, taken at t = ½; the loss of step 0 if None.
        every: Steps between evaluations; the last step is evaluated too.
        axes: Those to match; on the others b stays where `start` puts it.
        learning_rate: Of Adam where permutations are softened; elsewhere the length of a step relative
            to that of F.
        seed: Decides t.
        progress: Told of every evaluation: the step and the value.

    Raises:
        SymmetryError: As in `match_weights`; or the loss at the start is not finite.
    """
    if estimator not in ("straight-through", "sinkhorn"):
        raise SymmetryError(
            f"There is no estimator {estimator!r}", 'Use "straight-through" or "sinkhorn".'
        )
    pair = Pair(spec, a, b, axes=axes, start=start)
    search = _Search(pair, estimator)

    def value(element: Element) -> float:
        middle = search.between(search.moved(element), 0.5)
        with torch.no_grad():
            return float(loss(middle, 0)) if evaluate is None else float(evaluate(middle))

    best: Element = pair.start()
    best_step = 0
    losses = {0: value(best)}
    if not math.isfinite(losses[0]):
        raise SymmetryError(
            f"The loss between the two networks is {losses[0]} at the start",
            "Check the networks and the data, or start from a match by weights.",
        )
    optimizers = [matrices.optimizer(learning_rate) for matrices in search.matrices.values()]
    generator = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        t = float(torch.rand((), generator=generator))
        slope = loss(search.between(search.seen(), t), step)
        if torch.isfinite(slope):
            slope.backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if step % every and step != steps:
            continue
        element = search.element()
        losses[step] = value(element)
        if progress is not None:
            progress(step, losses[step])
        if losses[step] < losses[best_step]:
            best, best_step = element, step
    element = pair.in_own_coordinates(best)
    return LearnedMatching(element, pair.distance(element), pair.distance({}), losses, best_step)


class _Search:
    """Free matrices on all axes, and the networks that they stand for."""

    def __init__(self, pair: Pair, estimator: Estimator) -> None:
        self.pair = pair
        self.ends = {name: pair.a[name].detach() for name in pair.whole.tensors}
        frame = pair.frame_b
        self.begin = {
            name: pair.spec.act_on(frame, name, pair.moving[name].detach()) for name in self.ends
        }
        self.back = {axis: pair.spec.axes[axis].inverse(g) for axis, g in pair.frame_a.items()}
        self.matrices: dict[str, _Straight | _Softened] = {}
        start = pair.start()
        for axis, g in start.items():
            group = pair.spec.axes[axis]
            if estimator == "sinkhorn" and _permutes(group):
                self.matrices[axis] = _Softened(group, g)
            else:
                self.matrices[axis] = _Straight(group, pair.crosses(start, axis))

    def element(self) -> Element:
        """The group element of every axis next to the free matrices."""
        return {axis: matrices.element() for axis, matrices in self.matrices.items()}

    def seen(self) -> dict[str, Tensor]:
        """The moved network, through which gradients flow to the free matrices."""
        seen = {axis: matrices.seen() for axis, matrices in self.matrices.items()}
        spec = self.pair.spec
        return {
            name: spec.act_on(self.back, name, _followed(spec, seen, name, tensor))
            for name, tensor in self.begin.items()
        }

    def moved(self, element: Element) -> dict[str, Tensor]:
        """The moved network after a group element."""
        return self.pair.spec.act(self.back, self.pair.spec.act(element, self.begin))

    def between(self, moved: Mapping[str, Tensor], t: float) -> dict[str, Tensor]:
        """(1 − t) a + t g b; tensors of integers are a's."""
        return {
            name: torch.lerp(end, moved[name].to(end), t) if end.is_floating_point() else end
            for name, end in self.ends.items()
        }


def _permutes(group: Group[Any]) -> bool:
    return isinstance(group, Monomial) and group.permuted and group.factors in ("one", "positive")


class _Straight:
    """By role a free matrix, seen as ρ(g) of the element g next to all of them."""

    def __init__(self, group: Group[Any], crosses: Crosses) -> None:
        self.group = group
        self.free = {role: cross.clone().requires_grad_() for role, cross in crosses.items()}

    def optimizer(self, rate: float) -> torch.optim.Optimizer:
        return _Relative(list(self.free.values()), rate)

    def element(self) -> Any:
        return self.group.match({role: free.detach() for role, free in self.free.items()})

    def seen(self) -> dict[str, Tensor]:
        g = self.element()
        return {
            role: free + (_acting(self.group, g, role) - free).detach()
            for role, free in self.free.items()
        }


def _acting(group: Group[Any], g: Any, role: str) -> Tensor:
    """The matrix ρ(g)."""
    return group.act(g, torch.eye(group.size(role), dtype=torch.float64), role)


class _Relative(torch.optim.SGD):
    """Gradient descent with momentum, in steps of a fixed length relative to each matrix.

    Crosses of weights have no scale of their own, and only their proportions matter.
    """

    def __init__(self, matrices: list[Tensor], rate: float) -> None:
        groups = [
            {"params": [matrix], "lr": rate * float(matrix.detach().norm())} for matrix in matrices
        ]
        super().__init__(groups, lr=rate, momentum=_MOMENTUM, dampening=_MOMENTUM)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            slope = group["params"][0].grad
            if slope is not None and slope.any():
                slope /= slope.norm()
        super().step(closure)


class _Softened:
    """One free matrix, seen in all roles as the doubly stochastic matrix that Sinkhorn makes of it."""

    def __init__(self, group: Group[Any], start: Any) -> None:
        self.group = group
        n = group.size("vector")
        # So much of every row's mass is at first on its own unit.
        size = math.log(_START_MASS / (1 - _START_MASS) * max(1, n - 1))
        self.logits = (size * _acting(group, start, "gain")).requires_grad_()

    def optimizer(self, rate: float) -> torch.optim.Optimizer:
        return torch.optim.Adam([self.logits], lr=rate)

    def element(self) -> Any:
        return self.group.match({"vector": self.logits.detach()})

    def seen(self) -> dict[str, Tensor]:
        soft = sinkhorn(self.logits)
        return dict.fromkeys(self.group.roles, soft)


def sinkhorn(logits: Tensor, sweeps: int = _SINKHORN_SWEEPS) -> Tensor:
    """The doubly stochastic matrix diag(u) exp(logits) diag(v), nearly.

    Rows and columns are scaled to sum 1 in turn (Sinkhorn and Knopp 1967); columns come last and are
    exact.

    Args:
        logits: Shape [n, n].
        sweeps: How often.
    """
    for _ in range(sweeps):
        logits = logits - logits.logsumexp(dim=1, keepdim=True)
        logits = logits - logits.logsumexp(dim=0, keepdim=True)
    return logits.exp()


def _followed(
    spec: Spec, seen: Mapping[str, Mapping[str, Tensor]], name: str, tensor: Tensor
) -> Tensor:
    """`Spec.act_on` with a matrix for every axis and role in place of a group element."""
    for number, dimension in enumerate(spec.tensors[name]):
        for segment in dimension:
            rows = rows_of(tensor, number, segment)
            acted = times(seen[segment.axis][segment.role], rows).reshape(-1, *rows.shape[2:])
            if segment.positions is None:
                tensor = acted.movedim(0, number)
            else:
                tensor = tensor.clone()
                tensor.movedim(number, 0)[segment.positions] = acted
    return tensor
