"""Matrices of fixed rank as orbits of polar points under O(r)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from isthmus.geometry.euclidean import random_orthogonal
from isthmus.geometry.fixed_rank import FixedRank, Polar
from isthmus.geometry.linalg import broadcast, frobenius, one_thread, rotation_exp
from isthmus.geometry.manifold import Logarithm, Manifold
from isthmus.geometry.procrustes import chordal_mean, rotations

HORIZONTAL = 1e-9
"""Largest vertical part of a logarithm that counts as aligned."""

_STALL = 1e-12
_ROUNDING = 1e-14


class Quotient(Manifold[Polar]):
    """m x n matrices of rank r: FixedRank(m, n, r) modulo the gauge (UO, OᵀBO, VO).

    d(x, y) = min over O ∈ O(r) of d(x, y·O). O(r) acts by isometries, so at the minimum the
    logarithm is horizontal, orthogonal to the orbit (Huckemann, Hotz and Munk 2010, Intrinsic shape
    analysis, section 2), and `exp`, `inner` and `norm` are those of the points for horizontal
    vectors. `certified` then means: aligned, and both frames nearer than their injectivity radius.
    That no other alignment is better has no certificate; the two starts cover both determinants.

    Args:
        total: The polar points.
        max_iterations: Alignment steps after which the logarithm gives up and says so.
    """

    def __init__(self, total: FixedRank, *, max_iterations: int = 100) -> None:
        self.total = total
        self.max_iterations = max_iterations

    def __repr__(self) -> str:
        return f"Quotient({self.total})"

    def point(self, x: Polar) -> Polar:
        """The point in float64.

        Raises:
            MethodError: x is no polar point.
        """
        return self.total.point(x)

    def inner(self, x: Polar, u: Polar, v: Polar) -> Tensor:
        """⟨u, v⟩ of two horizontal vectors, shape [...]."""
        return self.total.inner(x, u, v)

    def align(self, x: Polar, y: Polar) -> Polar:
        """The gauge of y that is nearest to x."""
        x, y = self.point(x), self.point(y)
        return self.total._exp(x, self._logarithm(x, y).tangent)

    def _exp(self, x: Polar, u: Polar) -> Polar:
        return self.total._exp(x, u)

    def _logarithm(self, x: Polar, y: Polar) -> Logarithm[Polar]:
        """The logarithm towards the aligned y.

        Geodesics between frames stay in the span of both, so the search runs on coordinates there.
        """
        basis_u, x_u, y_u = _coordinates(x.u, y.u)
        basis_v, x_v, y_v = _coordinates(x.v, y.v)
        x_b, y_b = broadcast(x.b, y.b)
        r = x.b.shape[-1]
        small = FixedRank(x_u.shape[-2], x_v.shape[-2], r)
        with one_thread():
            found = self._descend(small, Polar(x_u, x_b, x_v), Polar(y_u, y_b, y_v))
        return Logarithm(
            tangent=Polar(basis_u @ found.tangent.u, found.tangent.b, basis_v @ found.tangent.v),
            length=found.length,
            residual=found.residual,
            iterations=found.iterations,
            converged=found.converged,
            certified=found.certified,
        )

    def _descend(self, small: FixedRank, x: Polar, y: Polar) -> Logarithm[Polar]:
        """Turn y from both Procrustes starts until log_x(y·O) is horizontal; keep the shorter.

        The step turns y against the vertical part of the logarithm, which is Newton's step for the
        squared distance in flat space; it is halved until the distance falls, and lengthened by the
        secant (Barzilai and Borwein 1988) where curvature allows. A start is dropped when the other
        is so much shorter that this one cannot catch up.
        """
        batch, r = x.b.shape[:-2], x.b.shape[-1]
        start = rotations(x, y)
        both = (2, *batch)
        x, y = (_flat(_expand(p, both)) for p in (x, y))
        o = start.reshape(-1, r, r)
        log = small._logarithm(x, y.turned(o))
        omega = small.gauge(x, log.tangent)
        step = torch.ones(len(o), dtype=o.dtype)
        taken = torch.zeros(len(o), dtype=torch.int64)
        going = (frobenius(omega) > _STALL) & ~_hopeless(small, x, log, omega)
        active = going.nonzero().squeeze(-1)
        for _ in range(self.max_iterations):
            if not len(active):
                break
            taken[active] += 1
            here, there = _pick(x, active), _pick(y, active)
            tried = o[active] @ rotation_exp(-step[active, None, None] * omega[active])
            new = small._logarithm(here, there.turned(tried))
            slope = small.gauge(here, new.tangent)
            before, after = _length(log)[active], _length(new)
            margin = _ROUNDING * (1 + before)
            gentler = frobenius(slope) < frobenius(omega[active])
            lower = (after <= before + margin) & (gentler | (after < before - margin))
            secant = _secant(step[active], omega[active], slope)
            step[active] = torch.where(lower, secant, step[active] / 2)
            moved = active[lower]
            o[moved], omega[moved] = tried[lower], slope[lower]
            log = _replace(log, new, moved, lower)
            going = (frobenius(omega[active]) > _STALL) & (step[active] > _ROUNDING)
            active = active[going & ~_hopeless(small, x, log, omega)[active]]
        aligned = frobenius(omega) <= HORIZONTAL
        best = _length(log).reshape(2, -1).argmin(dim=0)
        chosen = best * best.numel() + torch.arange(best.numel())

        def of(a: Tensor) -> Tensor:
            return a[chosen].reshape((*batch, *a.shape[1:]))

        return Logarithm(
            tangent=Polar(*map(of, log.tangent)),
            length=of(log.length),
            residual=of(log.residual),
            iterations=of(taken),
            converged=of(log.converged & aligned),
            certified=of(log.certified & aligned),
        )

    def project(self, x: Polar, u: Polar) -> Polar:
        """The horizontal part of the tangent part of u."""
        tangent = self.total.project(x, u)
        upright = self.total.vertical(x, self.total.gauge(x, tangent))
        return Polar(*(a - b for a, b in zip(tangent, upright, strict=True)))

    def random(self, generator: torch.Generator, batch: tuple[int, ...] = ()) -> Polar:
        """Random polar points."""
        return self.total.random(generator, batch)

    def _gaussian(self, generator: torch.Generator, x: Polar) -> Polar:
        return self.total._gaussian(generator, x)

    def isometry(self, generator: torch.Generator) -> Callable[[Polar], Polar]:
        """An isometry of the polar points, followed by another random gauge at every call."""
        move, r = self.total.isometry(generator), self.total.sizes[2]
        return lambda x: move(x).turned(random_orthogonal(generator, r, r))

    def guess(self, points: Polar, weights: Tensor) -> Polar:
        """The mean by chords."""
        return chordal_mean(points, weights).mean

    def stack(self, points: Sequence[Polar]) -> Polar:
        """K points or tangent vectors in one batch."""
        return self.total.stack(points)

    def scale(self, factor: Tensor | float, u: Polar) -> Polar:
        """The vector factor · u."""
        return self.total.scale(factor, u)

    def combine(self, factors: Tensor, vectors: Polar) -> Polar:
        """Σ_k factor_k u_k of K tangent vectors at one point."""
        return self.total.combine(factors, vectors)


def _coordinates(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """An orthonormal basis of the span of both frames, and the frames in it."""
    x, y = broadcast(x, y)
    basis = torch.linalg.qr(torch.cat([x, y], dim=-1)).Q
    return basis, basis.mT @ x, basis.mT @ y


def _expand(x: Polar, batch: tuple[int, ...]) -> Polar:
    return Polar(*(a.expand(*batch, *a.shape[-2:]) for a in x))


def _flat(x: Polar) -> Polar:
    return Polar(*(a.reshape(-1, *a.shape[-2:]) for a in x))


def _pick(x: Polar, index: Tensor) -> Polar:
    return Polar(*(a[index] for a in x))


def _length(log: Logarithm[Polar]) -> Tensor:
    """Lengths; infinite where no geodesic was found."""
    return torch.where(log.converged, log.length, torch.inf)


def _hopeless(small: FixedRank, x: Polar, log: Logarithm[Polar], omega: Tensor) -> Tensor:
    """Whether four times the gain that the slope predicts leaves a start behind the other one.

    In flat space the squared distance falls by the squared length of the vertical part.
    """
    vertical = small.vertical(x, omega)
    squared = _length(log).square().reshape(2, -1)
    within_reach = squared - 4 * small.inner(x, vertical, vertical).reshape(2, -1)
    return (within_reach > squared.flip(0)).flatten()


def _secant(step: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """The next step length from the change of the slope along the last one, within bounds."""
    change = ((old - new) * old).sum(dim=(-2, -1))
    ratio = step * old.square().sum(dim=(-2, -1)) / change
    return torch.where(change > 0, ratio, 2 * step).clamp(min=0.05, max=4.0)


def _replace(
    log: Logarithm[Polar], new: Logarithm[Polar], where: Tensor, source: Tensor
) -> Logarithm[Polar]:
    """The logarithms with some rows taken from others."""

    def put(a: Tensor, b: Tensor) -> Tensor:
        a = a.clone()
        a[where] = b[source]
        return a

    return Logarithm(
        tangent=Polar(*map(put, log.tangent, new.tangent)),
        length=put(log.length, new.length),
        residual=put(log.residual, new.residual),
        iterations=put(log.iterations, new.iterations),
        converged=put(log.converged, new.converged),
        certified=put(log.certified, new.certified),
    )
