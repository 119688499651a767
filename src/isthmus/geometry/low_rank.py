"""Distances and means of low-rank matrices: one choice of three geometries."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.geometry.fixed_rank import FixedRank, Polar
from isthmus.geometry.frechet import FrechetMean, Loss, frechet_mean, normalized
from isthmus.geometry.grassmann import Grassmann
from isthmus.geometry.linalg import broadcast, frobenius, one_thread, spectral
from isthmus.geometry.manifold import GeometryWarning
from isthmus.geometry.procrustes import chordal_mean, rotations
from isthmus.geometry.quotient import Quotient
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
    _known(distance)
    if distance == "canonical":
        return frechet_mean(points, share, Quotient(total), loss=loss, delta=delta)
    if loss != "squared":
        raise MethodError(
            f"low-rank mean: distance {distance!r} has only the squared loss, not {loss!r}",
            'use distance="canonical" for medians and Huber means',
        )
    places = [total.point(x) for x in points]
    stacked = total.stack(places)
    chordal = chordal_mean(stacked, share)
    if distance == "projection":
        mean, gradient, converged = chordal.mean, chordal.change, chordal.converged
        certified = torch.ones(len(points), dtype=torch.bool)
    else:
        m, n, r = total.sizes
        columns = frechet_mean([x.u for x in places], share, Grassmann(m, r), start=chordal.mean.u)
        rows = frechet_mean([x.v for x in places], share, Grassmann(n, r), start=chordal.mean.v)
        frames = Polar(columns.mean, chordal.mean.b, rows.mean)
        turned = stacked.turned(rotations(frames, stacked)[0])
        core = frechet_mean(list(turned.b), share, SPD(r))
        mean = Polar(columns.mean, core.mean, rows.mean)
        gradient = math.hypot(*(part.gradient_norm for part in (columns, core, rows)))
        converged = chordal.converged and all(x.converged for x in (columns, core, rows))
        certified = columns.certified & rows.certified
    if not chordal.converged:
        warnings.warn(
            f"low-rank mean: alignment by chords not settled (last change {chordal.change:.1e}); the "
            "points may share too few directions for one mean",
            GeometryWarning,
            stacklevel=2,
        )
    distances = _aligned_distance(total, mean, stacked, distance)
    return FrechetMean(
        mean=mean,
        functional=[float(share @ distances.square() / 2)],
        gradient_norm=gradient,
        converged=converged,
        distances=distances,
        certified=certified,
    )


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
