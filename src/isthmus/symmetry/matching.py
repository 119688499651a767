"""Matching two networks by their weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isthmus.symmetry.pair import Pair
from isthmus.symmetry.spec import Element, Spec

Progress = Callable[[int, str], None]
"""Told of every visit: the sweep, 0 for the first one from the free dimensions, and the axis."""

_SETTLED = 1e-4
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Matching:
    """An element that moves b next to a.

    Attributes:
        element: g, on all axes.
        distance: ‖a − g b‖ / ‖a‖ over all floating-point tensors, in a's own coordinates.
        before: ‖a − b‖ / ‖a‖.
        sweeps: How often all axes were visited.
        converged: The last sweep changed nothing beyond the tolerance.
        history: The cosine ⟨a, g b⟩ / ‖a‖‖b‖ of the balanced networks at the start and after every
            sweep. It never falls.
    """

    element: Element
    distance: float
    before: float
    sweeps: int
    converged: bool
    history: list[float]


def match_weights(
    spec: Spec,
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    *,
    axes: Collection[str] | None = None,
    start: Element | None = None,
    sweeps: int = 100,
    restarts: int = 0,
    seed: int = 0,
    balanced: bool = True,
    tolerance: float = _SETTLED,
    progress: Progress | None = None,
) -> Matching:
    """The element of the groups that moves b nearest to a, by coordinate descent.

    Both are balanced first, so that what is left to find keeps norms. Then axes are visited in random
    order, and each gets its best element given the others: the weight matching of Ainsworth, Hayase
    and Srinivasa (2023, Git Re-Basin, arXiv 2209.04836) for any group with a `match`. Its local
    optima are many, and the way in decides: the first sweep goes out from dimensions on which nothing
    acts (inputs, outputs, a vocabulary), and uses of each tensor only what the axes already
    matched have settled.

    Nearest is meant in balanced coordinates. Two networks that are near each other already, such as a model
    and its fine-tune, may end a little farther apart in a's own; then b stays as it is.

    Memory: a few tensors, the cross of one axis, and an element.

    Args:
        spec: Where the groups act.
        a: Tensors of the network that stays.
        b: Tensors of the one that moves, of the same names and shapes. Both are read one tensor at a
            time, several times.
        axes: Those to match; on the others b stays as it is, or as `start` says.
        start: Where to begin, instead of that first sweep.
        sweeps: Visits of all axes after which it gives up; `converged` is then False. With 0 the
            result is `start`, with the factors that balancing finds.
        restarts: Further descents from where b is, in other orders; the best one counts.
        seed: Decides the orders.
        balanced: False leaves out balancing, and the element keeps norms.
        tolerance: Smallest gain of the cosine in a sweep that counts, relative to what it lacks of 1,
            so that a copy is still found exactly.
        progress: Told of every visit.

    Raises:
        SymmetryError: The spec does not fit, a tensor differs in shape or holds NaN or infinity, or an
            axis does not exist.
    """
    pair = Pair(spec, a, b, axes=axes, start=start, balanced=balanced)
    before = pair.distance({})
    generator = torch.Generator().manual_seed(seed)
    best = _descended(pair, generator, sweeps, tolerance, progress, out=start is None)
    for _ in range(restarts):
        found = _descended(pair, generator, sweeps, tolerance, progress, out=False)
        if found.history[-1] > best.history[-1]:
            best = found
    element = pair.in_own_coordinates(best.element)
    distance = pair.distance(element)
    if start is None and distance > before:
        element, distance = spec.identity(), before
    return Matching(
        element=element,
        distance=distance,
        before=before,
        sweeps=len(best.history) - 1,
        converged=best.converged,
        history=best.history,
    )


@dataclass
class _Descent:
    element: dict[str, Any]
    history: list[float]
    converged: bool


def _descended(
    pair: Pair,
    generator: torch.Generator,
    sweeps: int,
    tolerance: float,
    progress: Progress | None,
    *,
    out: bool,
) -> _Descent:
    """Sweeps until one gains nothing; at first `out` from the free dimensions, if that is better."""
    element = pair.start()
    history = [pair.cosine(element)]
    if out:
        spread = _spread(pair, element, progress)
        cosine = pair.cosine(spread)
        if cosine > history[0]:
            element = spread
            history.append(cosine)
    axes = list(pair.spec.axes)
    repeated = {axis: pair.repeated(axis) for axis in axes}
    converged = not axes
    for sweep in range(1, sweeps + 1):
        if converged:
            break
        gain = 0.0
        for number in torch.randperm(len(axes), generator=generator).tolist():
            axis = axes[number]
            if progress is not None:
                progress(sweep, axis)
            gain += _visited(pair, element, axis, repeated[axis])
        gain = gain / pair.norms if pair.norms else 0.0
        history.append(history[-1] + gain)
        converged = gain <= max(tolerance * (1 - history[-1]), _ROUNDING)
    return _Descent(element, history, converged)


def _visited(pair: Pair, element: dict[str, Any], axis: str, repeated: set[str]) -> float:
    """Gives an axis its best element, and returns what ⟨a, g b⟩ gains; nothing where it would fall."""
    group = pair.spec.axes[axis]
    crosses = pair.crosses(element, axis)
    new = group.match(crosses)
    gain = group.score(new, crosses) - group.score(element[axis], crosses)
    if repeated:
        names = {name for name, _, _ in pair.uses(axis)}
        gain = pair.inner({**element, axis: new}, names) - pair.inner(element, names)
    if gain <= 0:
        return 0.0
    element[axis] = new
    return gain


def _spread(pair: Pair, start: dict[str, Any], progress: Progress | None) -> dict[str, Any]:
    """One sweep out from the free dimensions: next is always the axis with most to compare.

    An axis that nothing settled touches has all its tensors compared, as they are.
    """
    element = dict(start)
    settled: set[str] = set()
    while len(settled) < len(pair.spec.axes):
        evidence = {
            axis: pair.evidence(axis, settled) for axis in pair.spec.axes if axis not in settled
        }
        axis = max(evidence, key=lambda axis: evidence[axis])
        if progress is not None:
            progress(0, axis)
        crosses = pair.crosses(element, axis, settled if evidence[axis] else None)
        element[axis] = pair.spec.axes[axis].match(crosses)
        settled.add(axis)
    return element
