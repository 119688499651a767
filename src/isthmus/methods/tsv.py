"""Task singular vectors: merge in bases that keep the tasks apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.methods.matrix import GAUGE, MatrixMethod, orthogonalized, shared_rank
from isthmus.methods.method import BaseUse, Reach, Settings
from isthmus.methods.task_vectors import LAMBDA, WEIGHT

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TSV(MatrixMethod):
    """TSV-Merge (Gargiulo et al. 2024, arXiv 2412.00081).

    Each task vector is cut to its share of the rank, w_k τ_k ≈ U_k S_k V_kᵀ. With U = [U_1 ... U_K]
    and V likewise, the merge is U⊥ diag(S_1, ..., S_K) V⊥ᵀ, where U⊥ is the nearest matrix with
    orthonormal columns.

    Two choices differ from the authors' code, and only where it depends on arbitrary vectors. The
    share is not min(m, n) / K but the largest c for which sum_k min(rank_k, c) does not exceed the
    shared rank; on matrices of full rank both are the same. Singular vectors of singular value 0
    take no part, and dependent ones are orthogonalised on what they span.
    """

    def merge_matrices(self, deltas: Tensor, settings: Settings) -> Tensor:  # noqa: ARG002
        """Cut, orthogonalise, and put together."""
        import torch

        from isthmus.geometry.factored import numerical_rank

        parts = [torch.linalg.svd(delta, full_matrices=False) for delta in deltas]
        ranks = [numerical_rank(values) for _, values, _ in parts]
        share = rank_share(ranks, shared_rank(deltas, ranks))
        kept = [min(rank, share) for rank in ranks]
        left = torch.cat([u[:, :r] for (u, _, _), r in zip(parts, kept, strict=True)], dim=1)
        values = torch.cat([s[:r] for (_, s, _), r in zip(parts, kept, strict=True)])
        right = torch.cat([v[:r] for (_, _, v), r in zip(parts, kept, strict=True)])
        merged: Tensor = (orthogonalized(left) * values) @ orthogonalized(right.mT).mT
        return merged


def rank_share(ranks: Sequence[int], total: int) -> int:
    """The largest c with sum_k min(rank_k, c) ≤ total, and 1 at least."""
    share = 1
    while share < max(ranks) and sum(min(rank, share + 1) for rank in ranks) <= total:
        share += 1
    return share


TSV_MERGE = TSV(
    name="tsv",
    summary="Put the leading singular vectors of all tasks together, orthogonalised.",
    reference="Gargiulo et al. 2024, arXiv 2412.00081, TSV-Merge",
    explanation=(
        "Cuts the task vector of each matrix to its leading singular directions, each model its "
        "share of the rank, and makes the directions of all models orthonormal before they are "
        "summed, so that tasks interfere less. Tensors that are no matrices are averaged. Adapters "
        "are merged in the core, to the same numbers as in full. Takes a decomposition in float64 of "
        "each model's matrix: quick for adapters, slow for large full matrices."
    ),
    parameters=(WEIGHT, LAMBDA),
    base=BaseUse.REQUIRED,
    reach=Reach.MATRIX,
    spaces=("core",),
    gauge=GAUGE,
)
