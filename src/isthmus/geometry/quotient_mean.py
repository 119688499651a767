"""The Fréchet mean of low-rank matrices: frames, core and all gauges in one descent."""

from __future__ import annotations

from collections import deque

from torch import Tensor

from isthmus.geometry.aligned_sum import FINEST, SAME, AlignedSum, Move, Place, Rho
from isthmus.geometry.fixed_rank import Polar
from isthmus.geometry.frechet import FrechetMean
from isthmus.geometry.lbfgs import Memory
from isthmus.geometry.procrustes import chordal_mean

FLAT_STEPS = 10
FLAT_FALL = 1e-3
FLAT_GRADIENT = 1e-3
"""A valley is flat from where F falls by less than FLAT_FALL of itself in FLAT_STEPS steps, and the
gradient, still above FLAT_GRADIENT then, by less than half."""

_MEMORY = 60
_ARMIJO = 1e-4
_ROUNDING = 1e-13
_SMALLEST_STEP = 1e-8
_COARSEST = 1e-6
_FINER = 1e-4


def quotient_mean(
    points: Polar,
    weights: Tensor,
    rho: Rho,
    *,
    corners: bool = False,
    tolerance: float = 1e-10,
    max_evaluations: int = 200,
) -> FrechetMean[Polar]:
    """The minimiser of F(μ) = Σ w_k ρ(d(μ, x_k)) with the distance of `Quotient`.

    That distance is a minimum over gauges, so F is the least over O_1, …, O_K of the sum with
    distances d(μ, x_k·O_k) of polar points (`AlignedSum`). Here μ and all O_k descend together,
    instead of K inner searches at every step. The direction is that of limited-memory BFGS,
    preconditioned by the Hessian of flat space; every step that is taken lowers F. Where the
    curvature nearly vanishes that direction may be so long that numbers overflow: the step is
    halved then, as where F rises.

    Where that ends, the gauges are searched again over both components of O(r), and logarithms are
    taken afresh; if one is shorter, the descent goes on from there.

    Points far apart, such as adapters of unrelated tasks, pull μ in many directions that hardly
    differ in F: there are many local minima, and the way to one of them is long and magnifies
    rounding. If the evaluations do not suffice for it, the result is the place on the way where the
    valley begins to be flat, before rounding shows, and is not `converged`.

    Args:
        points: K points, stacked, both frames with the same number of rows, above r.
        weights: Shape [K], positive, of sum 1.
        rho: A loss of `frechet.py`.
        corners: Whether ρ has a corner at 0, so that one of the points may be the mean.
        tolerance: Largest gradient, relative to the mean pull Σ w ρ′ if that is above 1.
        max_evaluations: Of F.

    Returns:
        The mean. The gradient is that of μ and the gauges together. Where no start has a geodesic to
        every point: the mean by chords, at infinite distance.
    """
    total = AlignedSum(points, weights, rho)
    start = _start(total, corners=corners)
    place, trace, left = _descend(total, start, tolerance, max_evaluations)
    while _settled(place, tolerance):
        better = total.realigned(place)
        if not better.value < place.value - SAME * (1 + place.value):
            break
        further, more, left = _descend(total, better, tolerance, left)
        if not _settled(further, tolerance):
            break
        place, trace = further, trace + more
    return FrechetMean(
        mean=place.mean,
        functional=trace,
        gradient_norm=place.gradient_norm,
        converged=_settled(place, tolerance),
        distances=place.distances,
        certified=place.certified,
    )


def _settled(place: Place, tolerance: float) -> bool:
    return place.gradient_norm <= tolerance * place.pull


def _start(total: AlignedSum, *, corners: bool) -> Place:
    """The mean by chords, or if it may help the best of it and the points."""
    chordal = total.at_point(chordal_mean(total.points, total.weights).mean)
    if chordal.found and not corners:
        return chordal
    points = [Polar(*(part[k] for part in total.points)) for k in range(total.count)]
    return min([chordal, *map(total.at_point, points)], key=lambda place: place.value)


def _descend(
    total: AlignedSum, place: Place, tolerance: float, evaluations: int
) -> tuple[Place, list[float], int]:
    """Lower F until the gradient is small or F can not fall; without success, to the flat valley.

    Returns:
        Where it ended, F on the way, and the evaluations that are left.
    """
    memory = Memory(_MEMORY)
    values, norms = [place.value], [place.gradient_norm]
    size, step, slope = 1.0, place.gradient.flat(), 0.0
    recent = deque([place], maxlen=FLAT_STEPS + 1)
    valley: tuple[Place, int] | None = None
    while place.found and evaluations > 0 and not _settled(place, tolerance):
        if size == 1:
            step, slope = _direction(place, memory)
        accuracy = min(_COARSEST, max(FINEST, _FINER * place.gradient_norm))
        new = total.moved(place, Move.of(size * step, total.rank, total.count), accuracy)
        evaluations -= 1
        if new is not None and _lower(new, place, size * slope):
            memory.learn(size * step, new.gradient.flat() - place.gradient.flat())
            place, size = new, 1.0
            values.append(place.value)
            norms.append(place.gradient_norm)
            recent.append(place)
            if valley is None and _flat(values, norms):
                valley = recent[0], len(values) - FLAT_STEPS
            continue
        size /= 2
        if size < _SMALLEST_STEP:
            if not memory:
                break
            memory.forget()
            size = 1.0
    if valley is not None and not _settled(place, tolerance):
        place, steps = valley
        values = values[:steps]
    return place, values, evaluations


def _lower(new: Place, place: Place, expected: float) -> bool:
    """Whether F falls enough for a step that should change it by that much, or rounding hides it."""
    if new.value <= place.value + _ARMIJO * expected:
        return True
    level = new.value <= place.value * (1 + _ROUNDING)
    return level and new.gradient_norm < place.gradient_norm


def _direction(place: Place, memory: Memory) -> tuple[Tensor, float]:
    """A step along which F falls, and the slope of F along it."""

    def newton(gradient: Tensor) -> Tensor:
        count, rank = place.turns.shape[:2]
        return place.hessian.solve(Move.of(gradient, rank, count)).flat()

    gradient = place.gradient.flat()
    if place.held:
        share = place.gradient_norm / (place.gradient_norm + place.held)
        return -share * newton(gradient), -(place.gradient_norm**2) / place.hessian.stiffness
    step = memory.direction(gradient, newton)
    slope = float(step @ gradient)
    if slope < 0:
        return step, slope
    memory.forget()
    step = -newton(gradient)
    return step, float(step @ gradient)


def _flat(values: list[float], norms: list[float]) -> bool:
    if len(values) <= FLAT_STEPS or norms[-1] <= FLAT_GRADIENT:
        return False
    fall = values[-1 - FLAT_STEPS] - values[-1]
    return fall < FLAT_FALL * values[-1] and norms[-1] > norms[-1 - FLAT_STEPS] / 2
