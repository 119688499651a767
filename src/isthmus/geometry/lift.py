"""Matrices of several ranks brought to one rank, where they are points of one manifold."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.geometry.fixed_rank import Polar

NEGLIGIBLE = 1e-6
"""A singular value this small beside the matrix's largest counts as absent: the logarithm of a core
of condition 1e6 keeps ten digits."""

FLOOR = 0.1
"""Singular values of added directions beside the smallest of the matrix's own. A direction that one
of K equally weighted matrices has then comes out of their geometric mean with about 1/K of its
strength for K from 2 to 6, as it does out of the arithmetic mean."""


class Lifted(NamedTuple):
    """K matrices as points of one rank.

    Attributes:
        points: Stacked, shape [K, ...].
        cut: Which of them lost directions, shape [K].
        raised: Which of them gained directions, shape [K].
    """

    points: Polar
    cut: Tensor
    raised: Tensor


def lifted(cores: Tensor, weights: Tensor, rank: int) -> Lifted:
    """The points of rank r nearest to these matrices, or just above them.

    A matrix of a higher rank is cut to its r largest singular values. One of a lower rank ρ, with
    frames U and V, gains the r − ρ strongest singular directions of (I − UUᵀ) M (I − VVᵀ), where
    M = Σ w_k ΔW_k: what all of them together have outside its own spaces. Their singular values are
    FLOOR times its smallest, because no positive definite core has zeros. Nothing but the matrices
    enters, so the points do not depend on factorisations.

    Args:
        cores: None of them zero, shape [K, m, n].
        weights: Positive, shape [K].
        rank: The rank r that is wanted; less comes back where M does not reach it for some matrix.

    Raises:
        MethodError: if a matrix is zero, or the rank below 1.
    """
    if rank < 1:
        raise MethodError(f"there are no points of rank {rank}", "Ask for rank 1 or more.")
    u, values, vh = torch.linalg.svd(cores, full_matrices=False)
    if not (values[:, 0] > 0).all():
        raise MethodError("a zero matrix has no point of any rank", "Leave it out of the mean.")
    ranks = (values > NEGLIGIBLE * values[:, :1]).sum(dim=1)
    total = torch.tensordot(weights / weights.sum(), cores, dims=1)
    scale = values[:, 0].max()
    added = {}
    reach = min(rank, *cores.shape[1:])
    for k in (ranks < reach).nonzero().flatten().tolist():
        own = int(ranks[k])
        left, right = u[k, :, :own], vh[k, :own]
        rest = total - left @ (left.mT @ total)
        rest = rest - (rest @ right.mT) @ right
        more, strength, across = torch.linalg.svd(rest, full_matrices=False)
        count = min(int((strength > NEGLIGIBLE * scale).sum()), reach - own)
        added[k] = more[:, :count], across[:count]
    r = min([reach, *(int(ranks[k]) + len(rows) for k, (_, rows) in added.items())])
    points = []
    for k, own in enumerate(ranks.tolist()):
        kept = min(own, r)
        left, core, right = u[k, :, :kept], values[k, :kept], vh[k, :kept]
        if kept < r:
            more, across = added[k]
            left = torch.cat([left, more[:, : r - kept]], dim=1)
            right = torch.cat([right, across[: r - kept]])
            core = torch.cat([core, FLOOR * core[-1].expand(r - kept)])
        points.append(Polar(left, torch.diag(core), right.mT))
    stacked = Polar(*(torch.stack(parts) for parts in zip(*points, strict=True)))
    return Lifted(stacked, ranks > r, ranks < r)
