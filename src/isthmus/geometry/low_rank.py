"""Distances and means of low-rank matrices: one choice of three geometries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.geometry.fixed_rank import FixedRank, Polar
from isthmus.geometry.frechet import (
    FrechetMean,
    Loss,
    descended,
    loss_function,
    normalized,
    squared,
    warn_unsettled,
)
from isthmus.geometry.grassmann import Grassmann
from isthmus.geometry.linalg import broadcast, frobenius, one_thread, spectral
from isthmus.geometry.procrustes import chordal_mean, rotations
from isthmus.geometry.quotient import Quotient
from isthmus.geometry.quotient_mean import quotient_mean
from isthmus.geometry.spd import SPD

Distance = Literal["canonical", "grassmann", "projection"]


@one_thread()
def low_rank_distance(x: Polar, y: Polar, distance: Distance = "canonical") -> Tensor:
    """How far apart two matrices of the same rank are, whatever their gauges.

    With y turned by O:

    - "canonical": d² = d_St(U_x, U_yO)² + d_SPD(B_x, OᵀB_yO)² + d_St(V_x, V_yO)², the least over all
      O ∈ O(r): `Quotient`. Warns where it found no geodesic.
    - "grassmann": d² = ‖θ_U‖² + d_SPD(B_x, OᵀB_yO)² + ‖θ_V‖² with the principal angles between the
      column spaces and between the row spaces, and O the polar factor of U_yᵀU_x + V_yᵀV_x. In
      closed form for every pair (after Bonnabel and Sepulchre 2009, section 4); it ignores how far
      the rows turn against the columns.
    - "projection": d² = ‖U_x − U_yO‖² + ‖log B_x − log OᵀB_yO‖² + ‖V_x − V_yO‖² with the same O:
      chords instead of arcs, the cheapest.

    Args:
        x: Points, batched over leading dimensions.
        y: Points of the same sizes.
        distance: Which of the three.

    Returns:
        Shape [...].

    Raises:
        MethodError: Points of different sizes, no points, or no such distance.
    """
    total = _space([x, y])
    _known(distance)
    x, y = total.point(x), total.point(y)
    if distance == "canonical":
        return Quotient(total).dist(x, y)
    return _aligned_distance(total, x, y, distance)


def _aligned_distance(total: FixedRank, x: Polar, y: Polar, distance: Distance) -> Tensor:
    m, n, r = total.sizes
    y = y.turned(rotations(x, y)[0])
    if distance == "projection":
        core = spectral(x.b, torch.log) - spectral(y.b, torch.log)
        parts = [frobenius(x.u - y.u), frobenius(core), frobenius(x.v - y.v)]
    else:
        parts = [
            Grassmann(m, r)._logarithm(x.u, y.u).length,
            SPD(r)._logarithm(x.b, y.b).length,
            Grassmann(n, r)._logarithm(x.v, y.v).length,
        ]
    return torch.stack(broadcast(*parts)).square().sum(dim=0).sqrt()


@one_thread()
def low_rank_mean(
    points: Sequence[Polar],
    weights: Sequence[float] | Tensor | None = None,
    *,
    distance: Distance = "canonical",
    loss: Loss = "squared",
    delta: float | None = None,
) -> FrechetMean[Polar]:
    """The mean of low-rank matrices, of the same rank, under one of three distances.

    "canonical" is the Fréchet mean on `Quotient`. The other two average the frames first, by
    principal angles or by chords, then the cores turned along (Bonnabel, Collard and Sepulchre 2013,
    Rank-preserving geometric means of positive semi-definite matrices, section 4).

    Args:
        points: K points of the same sizes, without batch dimensions.
        weights: Shape [K], non-negative; scaled to sum 1. Equal if None.
        distance: As in `low_rank_distance`.
        loss: As in `frechet_mean`; other losses than "squared" need "canonical".
        delta: Huber's threshold.

    Returns:
        The mean. For "grassmann" and "projection", whose alignment does not look at the cores, the
        functional is given at the end only, and the gradient is that of the averages one by one (for
        chords, the last change).

    Raises:
        MethodError: No points, different sizes, bad weights, or a loss that the distance lacks.
    """
    share = normalized(weights, len(points))
    total = _space(points)
    stacked = total.stack([total.point(x) for x in points])
    found = stacked_mean(stacked, share, distance, loss, delta)
    if not found.converged:
        warn_unsettled(found, total, stacklevel=3)
    return found


@one_thread()
def stacked_mean(
    points: Polar,
    share: Tensor,
    distance: Distance = "canonical",
    loss: Loss = "squared",
    delta: float | None = None,
) -> FrechetMean[Polar]:
    """`low_rank_mean` for K stacked points that were checked, without a warning.

    It is computed in the span of all frames: a reflection that leaves the span alone is an isometry,
    so geodesics and means of points in the span stay there.
    """
    _known(distance)
    rho = loss_function(loss, delta)
    if distance != "canonical" and loss != "squared":
        raise MethodError(
            f"low-rank mean: distance {distance!r} has only the squared loss, not {loss!r}",
            'use distance="canonical" for medians and Huber means',
        )
    counted = share > 0
    within, bases = _reduced(Polar(*(part[counted] for part in points)))
    if distance == "canonical":
        found = quotient_mean(within, share[counted], rho, corners=loss == "median")
    else:
        found = _averaged(within, share[counted], distance)
    mean = Polar(bases[0] @ found.mean.u, found.mean.b, bases[1] @ found.mean.v)
    distances, certified = share.new_zeros(len(share)), counted.clone()
    distances[counted], certified[counted] = found.distances, found.certified
    if not counted.all():
        others = Polar(*(part[~counted] for part in points))
        distances[~counted], certified[~counted] = _measured(mean, others, distance)
    return replace(found, mean=mean, distances=distances, certified=certified)


def _measured(x: Polar, y: Polar, distance: Distance) -> tuple[Tensor, Tensor]:
    """Distances and certificates."""
    total = FixedRank(x.u.shape[-2], x.v.shape[-2], x.b.shape[-1])
    if distance == "canonical":
        log = Quotient(total)._logarithm(x, y)
        return log.length, log.certified
    lengths = _aligned_distance(total, x, y, distance)
    return lengths, torch.ones_like(lengths, dtype=torch.bool)


def _averaged(points: Polar, share: Tensor, distance: Distance) -> FrechetMean[Polar]:
    """The mean by chords, or by principal angles and then cores."""
    rows, r = points.u.shape[-2:]
    total = FixedRank(rows, rows, r)
    chordal = chordal_mean(points, share)
    mean, gradient, converged = chordal.mean, chordal.change, chordal.converged
    certified = torch.ones(len(share), dtype=torch.bool)
    if distance == "grassmann":
        spaces = Grassmann(rows, r)
        columns = descended(list(points.u), share, spaces, squared, start=mean.u)
        across = descended(list(points.v), share, spaces, squared, start=mean.v)
        frames = Polar(columns.mean, mean.b, across.mean)
        turned = points.turned(rotations(frames, points)[0])
        core = descended(list(turned.b), share, SPD(r), squared)
        mean = Polar(columns.mean, core.mean, across.mean)
        gradient = math.hypot(*(part.gradient_norm for part in (columns, core, across)))
        converged = columns.converged and core.converged and across.converged
        certified = columns.certified & core.certified & across.certified
    distances = _aligned_distance(total, mean, points, distance)
    return FrechetMean(
        mean=mean,
        functional=[float(share @ distances.square() / 2)],
        gradient_norm=gradient,
        converged=converged,
        distances=distances,
        certified=certified,
    )


def _reduced(points: Polar) -> tuple[Polar, tuple[Tensor, Tensor]]:
    """The points in bases of the spans of all their frames, and these bases.

    Both frames get the same number of rows, above r, by rows of zeros that the bases map to zero.
    """
    left, right = _span(points.u), _span(points.v)
    u, v = left.mT @ points.u, right.mT @ points.v
    rows = max(u.shape[-2], v.shape[-2], u.shape[-1] + 1)

    def filled(a: Tensor) -> Tensor:
        return torch.cat([a, a.new_zeros(len(a), rows - a.shape[-2], a.shape[-1])], dim=-2)

    def widened(basis: Tensor) -> Tensor:
        return torch.cat([basis, basis.new_zeros(len(basis), rows - basis.shape[-1])], dim=-1)

    return Polar(filled(u), points.b, filled(v)), (widened(left), widened(right))


def _span(frames: Tensor) -> Tensor:
    """An orthonormal basis of the sum of K column spaces, [K, m, r] to [m, at most Kr]."""
    count, m, r = frames.shape
    if count * r >= m:
        return torch.eye(m, dtype=frames.dtype)
    basis: Tensor = torch.linalg.qr(frames.movedim(0, -2).reshape(m, count * r)).Q
    return basis


def _space(points: Sequence[Polar]) -> FixedRank:
    """The polar points of the sizes of the first, to which the others are then held."""
    u, b, v = points[0]
    if u.ndim < 2 or v.ndim < 2:
        raise MethodError(
            f"polar point: frames of shapes {list(u.shape)} and {list(v.shape)}",
            "build points with Polar.of_pair",
        )
    ranks = {x.b.shape[-1] for x in points}
    if len(ranks) > 1:
        raise MethodError(
            f"polar points of ranks {sorted(ranks)} cannot be compared",
            f"build them all with Polar.of_pair(..., rank={min(ranks)})",
        )
    return FixedRank(u.shape[-2], v.shape[-2], b.shape[-1])


def _known(distance: str) -> None:
    if distance not in ("canonical", "grassmann", "projection"):
        raise MethodError(
            f"there is no distance {distance!r}", 'use "canonical", "grassmann" or "projection"'
        )
