"""Alignment of polar points by chords: closed forms, no geodesics."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.geometry.fixed_rank import Polar
from isthmus.geometry.linalg import frobenius, polar
from isthmus.geometry.spd import SPD

_SWEEPS = 200
_SETTLED = 1e-12


def overlap(x: Polar, y: Polar) -> Tensor:
    """U_yᵀU_x + V_yᵀV_x, shape [..., r, r]; its polar factor turns y next to x."""
    return y.u.mT @ x.u + y.v.mT @ x.v


def rotations(x: Polar, y: Polar) -> Tensor:
    """The orthogonal O of either determinant that bring y.turned(O) next to x.

    Each maximises tr Oᵀ(U_yᵀU_x + V_yᵀV_x) among its component of O(r) (Schönemann 1966, A
    generalized solution of the orthogonal Procrustes problem; Kabsch 1978 for the determinant).

    Returns:
        Shape [2, ..., r, r]; the first is the better one.
    """
    left, _, right = torch.linalg.svd(overlap(x, y))
    flipped = left.clone()
    flipped[..., -1] *= -1
    return torch.stack([left @ right, flipped @ right])


class ChordalMean(NamedTuple):
    """A mean by chords.

    Attributes:
        mean: One point.
        change: How far the last sweep moved the frames.
        converged: That is rounding.
    """

    mean: Polar
    change: float
    converged: bool


def chordal_mean(points: Polar, weights: Tensor) -> ChordalMean:
    """The mean by chords: frames averaged and made orthonormal again, cores log-Euclidean.

    Minimises Σ w_k (‖U − U_kO_k‖² + ‖V − V_kO_k‖²) over frames and gauges in turn; both steps are
    polar factors. The gauges start at the leading eigenvectors of the overlaps of all pairs (Ling
    2023, Near-optimal bounds for generalized orthogonal Procrustes problem via generalized power
    method, arXiv 2112.13725), so that neither order nor gauges of the points matter.

    Args:
        points: K points, shape [K, ...].
        weights: Shape [K], non-negative, of sum 1.
    """
    count, m, r = points.u.shape
    frames = torch.cat([points.u, points.v], dim=-2)
    flat = (frames * weights.sqrt().reshape(-1, 1, 1)).movedim(0, -2).reshape(-1, count * r)
    leading = torch.linalg.svd(flat, full_matrices=False).Vh[:r].mT
    turns = polar(leading.reshape(count, r, r))
    mean = torch.zeros_like(frames[0])
    change = float("inf")
    for _ in range(_SWEEPS):
        center = torch.einsum("k,kni,kij->nj", weights, frames, turns)
        previous, mean = mean, torch.cat([polar(center[:m]), polar(center[m:])])
        turns = polar(frames.mT @ mean)
        change = float(frobenius(mean - previous))
        if change <= _SETTLED:
            break
    core = SPD(r).guess(points.turned(turns).b, weights)
    return ChordalMean(Polar(mean[:m], core, mean[m:]), change, change <= _SETTLED)
