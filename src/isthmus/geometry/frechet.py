"""Fréchet means, medians and Huber means on any manifold."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.geometry.linalg import computed
from isthmus.geometry.manifold import GeometryWarning, Logarithm, Manifold

P = TypeVar("P")

Loss = Literal["squared", "huber", "median"]

_ARMIJO = 1e-4
_ROUNDING = 1e-13
_SAME = 1e-12
_SMALLEST_STEP = 1e-6


@dataclass(frozen=True)
class FrechetMean(Generic[P]):
    """A minimiser of F(μ) = Σ w_k ρ(d(μ, x_k)), and what is known about it.

    Attributes:
        mean: μ.
        functional: F at the start and after every step; it falls, but for rounding (1e-13 of it).
        gradient_norm: Length of the Riemannian gradient of F at μ.
        converged: The gradient vanishes within the tolerance.
        distances: d(μ, x_k), shape [K].
        certified: Which of the K logarithms are known to be the shortest, shape [K]. Where one is
            not, μ is a critical point of F taken along the geodesics that were found.
    """

    mean: P
    functional: list[float]
    gradient_norm: float
    converged: bool
    distances: Tensor
    certified: Tensor


def squared(d: Tensor) -> tuple[Tensor, Tensor]:
    """ρ(d) = ½d² and ρ′(d)."""
    return d.square() / 2, d


def median(d: Tensor) -> tuple[Tensor, Tensor]:
    """ρ(d) = d and ρ′(d)."""
    return d, torch.ones_like(d)


def huber(delta: float) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """ρ(d) = ½d² up to δ, then δ(d − ½δ), and ρ′(d)."""

    def rho(d: Tensor) -> tuple[Tensor, Tensor]:
        near = d.clamp(max=delta)
        return near * (d - near / 2), near

    return rho


def normalized(weights: Sequence[float] | Tensor | None, count: int) -> Tensor:
    """Weights of sum 1, shape [count]; equal ones for None.

    Raises:
        MethodError: No points, another number of weights, negative or non-finite ones, or sum 0.
    """
    if count == 0:
        raise MethodError("Fréchet mean: there are no points", "give at least one point")
    if weights is None:
        return torch.full((count,), 1 / count, dtype=torch.float64)
    w = torch.as_tensor(weights, dtype=torch.float64)
    if w.shape != (count,):
        raise MethodError(
            f"Fréchet mean: weights of shape {list(w.shape)} for {count} points",
            "give one weight for each point",
        )
    if not torch.isfinite(w).all() or (w < 0).any() or not w.sum() > 0:
        raise MethodError(
            f"Fréchet mean: weights {w.tolist()} are no shares",
            "give finite weights, none negative and at least one positive",
        )
    return w / w.sum()


def frechet_mean(
    points: Sequence[P],
    weights: Sequence[float] | Tensor | None,
    manifold: Manifold[P],
    *,
    loss: Loss = "squared",
    delta: float | None = None,
    start: P | None = None,
    tolerance: float = 1e-10,
    max_iterations: int = 200,
) -> FrechetMean[P]:
    """The point that minimises Σ w_k ρ(d(μ, x_k)).

    Gradient descent μ ← exp_μ(t Σ w_k ρ′(d_k)/d_k log_μ x_k) (Karcher 1977, Riemannian center of mass
    and mollifier smoothing; Fletcher, Venkatasubramanian and Joshi 2009, The geometric median on
    Riemannian manifolds). The step t is Barzilai and Borwein's along the last geodesic
    (Iannazzo and Porcelli 2018), halved until F falls enough (Armijo). Two points: the start lies on
    their geodesic at its weights, which is the answer.

    Args:
        points: K points without batch dimensions.
        weights: Shape [K], non-negative; scaled to sum 1. Equal if None.
        manifold: Where the points are.
        loss: "squared" gives the mean, "median" the geometric median, "huber" the mean of points
            nearer than delta and a median of farther ones.
        delta: Huber's threshold, a distance.
        start: Where to begin; `manifold.guess` if None.
        tolerance: Largest gradient, relative to the mean pull Σ w ρ′ if that is above 1.
        max_iterations: Steps tried after which it gives up and warns.

    Raises:
        MethodError: No points, points off the manifold, bad weights, or delta missing or unused.
    """
    share = normalized(weights, len(points))
    rho = loss_function(loss, delta)
    places = [manifold.point(x) for x in points]
    result = descended(
        places,
        share,
        manifold,
        rho,
        corners=loss == "median",
        start=None if start is None else manifold.point(start),
        tolerance=tolerance,
        max_iterations=max_iterations,
    )
    if not result.converged:
        warn_unsettled(result, manifold, stacklevel=3)
    return result


def loss_function(loss: str, delta: float | None) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """ρ and ρ′ by name.

    Raises:
        MethodError: No such loss, or delta missing or unused.
    """
    if loss not in ("squared", "huber", "median"):
        raise MethodError(
            f"Fréchet mean: there is no loss {loss!r}", 'use "squared", "huber" or "median"'
        )
    if (loss == "huber") != (delta is not None and delta > 0):
        raise MethodError(
            f"Fréchet mean: loss {loss!r} with delta {delta}",
            'give a positive delta, a distance, to "huber" and to no other loss',
        )
    return huber(delta) if delta is not None else squared if loss == "squared" else median


def warn_unsettled(result: FrechetMean[P], where: object, stacklevel: int) -> None:
    """Tell that a mean did not converge."""
    warnings.warn(
        f"Fréchet mean on {where}: not converged (gradient {result.gradient_norm:.1e} after "
        f"{len(result.functional) - 1} steps); the points may be too far apart for one mean",
        GeometryWarning,
        stacklevel=stacklevel,
    )


def descended(
    places: list[P],
    share: Tensor,
    manifold: Manifold[P],
    rho: Callable[[Tensor], tuple[Tensor, Tensor]],
    *,
    corners: bool = False,
    start: P | None = None,
    tolerance: float = 1e-10,
    max_iterations: int = 200,
) -> FrechetMean[P]:
    """`frechet_mean` for points and weights that were checked, without a warning.

    Args:
        places: K points.
        share: Shape [K], of sum 1.
        manifold: Where they are.
        rho: ρ and ρ′.
        corners: Whether ρ has a corner at 0.
        start: Where to begin.
        tolerance: As in `frechet_mean`.
        max_iterations: As in `frechet_mean`.
    """
    descent = _Descent(manifold, places, share, rho)
    state = descent.at(_begin(descent, start, corners=corners))

    trace, step = [state.value], state.natural_step
    for _ in range(max_iterations):
        smallest = _SMALLEST_STEP * state.natural_step
        if state.gradient_norm <= tolerance * state.pull or step < smallest:
            break
        new = descent.tried(state, step)
        gain = _ARMIJO * step * state.gradient_norm**2
        if new is None or not new.value <= state.value - gain + _ROUNDING * abs(state.value):
            step /= 2
            continue
        step, state = descent.next_step(step, new), new
        trace.append(state.value)

    return FrechetMean(
        mean=state.x,
        functional=trace,
        gradient_norm=state.gradient_norm,
        converged=state.gradient_norm <= tolerance * state.pull and state.found,
        distances=state.distances,
        certified=state.certified,
    )


@dataclass(frozen=True)
class _State(Generic[P]):
    """F and its gradient at one place."""

    x: P
    value: float
    direction: P
    gradient_norm: float
    pull: float
    natural_step: float
    distances: Tensor
    certified: Tensor
    found: bool
    back: P


class _Descent(Generic[P]):
    """F(μ) = Σ w_k ρ(d(μ, x_k)) for given points."""

    def __init__(
        self,
        manifold: Manifold[P],
        points: list[P],
        weights: Tensor,
        rho: Callable[[Tensor], tuple[Tensor, Tensor]],
    ) -> None:
        self.manifold = manifold
        self.points = points
        self.weights = weights
        self.rho = rho

    def at(self, x: P, previous: P | None = None) -> _State[P]:
        """F, its steepest descent, and the way back to the previous place.

        At a point x_j itself ρ(d) = d has no gradient; the descent there is what the others pull
        beyond w_j (Vardi and Zhang 2000, The multivariate L1-median).
        """
        targets = self.manifold.stack([*self.points, x if previous is None else previous])
        logs: Logarithm[P] = self.manifold._logarithm(x, targets)
        distances = logs.length[:-1]
        value, slope = self.rho(distances)
        here = distances <= _SAME
        pull = self.weights * slope
        factors = torch.where(here, 0.0, pull / torch.where(here, 1.0, distances))
        nothing = factors.new_zeros(1)
        direction = self.manifold.combine(torch.cat([factors, nothing]), logs.tangent)
        length = float(self.manifold.norm(x, direction))
        held = float(pull[here].sum())
        free = max(0.0, length - held)
        return _State(
            x=x,
            value=float(self.weights @ value),
            direction=self.manifold.scale(free / length if length else 0.0, direction),
            gradient_norm=free,
            pull=max(1.0, float(pull.sum())),
            natural_step=1 / float(factors.sum()) if factors.any() else 1.0,
            distances=distances,
            certified=logs.certified[:-1],
            found=bool(logs.converged[:-1].all()),
            back=self.manifold.combine(
                torch.cat([torch.zeros_like(factors), nothing + 1]), logs.tangent
            ),
        )

    def tried(self, state: _State[P], step: float) -> _State[P] | None:
        """One step further; None where it is so long that numbers overflow."""
        move = self.manifold.scale(step, state.direction)
        return computed(lambda: self.at(self.manifold._exp(state.x, move), state.x))

    def next_step(self, step: float, new: _State[P]) -> float:
        """The step that the change of the gradient along the last geodesic suggests.

        The last step s arrives as −back, the gradient it started from as back/t.
        """
        moved = float(self.manifold.inner(new.x, new.back, new.back))
        bend = float(self.manifold.inner(new.x, new.back, new.direction)) + moved / step
        suggested = moved / bend if bend > 0 else 2 * step
        return min(max(suggested, new.natural_step / 10), new.natural_step * 1000)


def _begin(descent: _Descent[P], start: P | None, *, corners: bool) -> P:
    """Where the descent starts.

    A median may sit on one of the points, where F has a corner and descent would creep. From the
    best of them F falls below all corners at once, or that point is the median.
    """
    manifold, points, weights = descent.manifold, descent.points, descent.weights
    if start is not None:
        guess = start
    elif len(points) == 1:
        guess = points[0]
    elif len(points) == 2:
        velocity = manifold._logarithm(points[0], points[1]).tangent
        guess = manifold._exp(points[0], manifold.scale(float(weights[1]), velocity))
    else:
        guess = manifold.guess(manifold.stack(points), weights)
    if not corners:
        return guess
    best, value = guess, descent.at(guess).value
    for x in points:
        here = descent.at(x).value
        if here < value - _SAME * math.fabs(value):
            best, value = x, here
    return best
