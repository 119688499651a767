"""Alignment of polar points by chords: closed forms, no geodesics."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.geometry.fixed_rank import Polar
from isthmus.geometry.linalg import frobenius, polar
from isthmus.geometry.spd import SPD

_SWEEPS = 100
_SETTLED = 1e-13


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


def polar_mean(points: Polar, weights: Tensor) -> Polar:
    """The mean by chords: frames averaged and made orthonormal again, cores log-Euclidean.

    Gauges O_k that maximise ‖Σ w_k (U_kO_k, V_kO_k)‖ come from the leading eigenvectors of the
    overlaps of all pairs, then from sweeps that turn every point next to the mean of all (the
    generalised power method; Ling 2023, Near-optimal bounds for generalized orthogonal Procrustes
    problem via generalized power method, arXiv 2112.13725, algorithm 1). Neither the order nor the
    gauges of the points matter.

    Args:
        points: K points, shape [K, ...].
        weights: Shape [K], non-negative, of sum 1.

    Returns:
        One point.
    """
    count, r = len(weights), points.b.shape[-1]
    frames = torch.cat([points.u, points.v], dim=-2)
    wide = frames.movedim(0, -2).reshape(-1, count, r)
    flat = (wide * weights.sqrt().unsqueeze(-1)).reshape(-1, count * r)
    leading = torch.linalg.svd(flat, full_matrices=False).Vh[:r].mT
    turns = polar(leading.reshape(count, r, r))
    center = torch.einsum("k,kni,kij->nj", weights, frames, turns)
    for _ in range(_SWEEPS):
        turns = polar(frames.mT @ center)
        previous = center
        center = torch.einsum("k,kni,kij->nj", weights, frames, turns)
        if frobenius(center - previous) <= _SETTLED * frobenius(center):
            break
    m = points.u.shape[-2]
    core = SPD(r).guess(points.turned(turns).b, weights)
    return Polar(polar(center[:m]), core, polar(center[m:]))
