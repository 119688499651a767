"""Isotropic merging: a flat spectrum, in the common subspace and in those of the tasks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from isthmus.methods.matrix import GAUGE, MatrixMethod, orthogonalized, shared_rank
from isthmus.methods.method import BaseUse, Reach, Settings
from isthmus.methods.parameters import Parameter, Scope
from isthmus.methods.task_vectors import LAMBDA, WEIGHT

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class IsoC(MatrixMethod):
    """Iso-C (Marczak et al. 2025, arXiv 2502.04959).

    With sum_k w_k τ_k = U S Vᵀ the merge is s̄ U Vᵀ, s̄ the mean of the singular values. Where the
    sum has less than full rank, mean and directions are those of the singular values that are not
    zero; the authors' code would give the arbitrary others the same length.
    """

    def merge_matrices(self, deltas: Tensor, settings: Settings) -> Tensor:  # noqa: ARG002
        """Sum, and flatten the spectrum."""
        import torch

        from isthmus.geometry.factored import numerical_rank

        u, values, v = torch.linalg.svd(deltas.sum(dim=0), full_matrices=False)
        rank = numerical_rank(values)
        merged: Tensor = values[:rank].mean() * (u[:, :rank] @ v[:rank]) if rank else u @ v * 0
        return merged


@dataclass(frozen=True, kw_only=True)
class IsoCTS(MatrixMethod):
    """Iso-CTS (Marczak et al. 2025, arXiv 2502.04959).

    Of R directions the first c are the leading ones of the sum, U_c S_c V_cᵀ. The rest are shared
    out: each task gives the leading singular directions of what U_c leaves of it,
    (I − U_c U_cᵀ) w_k τ_k. All are orthogonalised, and all have the mean of their singular values.

    As in the authors' code, R − c is the multiple of K nearest to the fraction told. R is
    min(m, n) for matrices of full rank as it is there; otherwise the shared rank, as in Panariello et
    al. 2025 (arXiv 2509.17786), who run it in the core. Directions of singular value 0 take no part.
    """

    def merge_matrices(self, deltas: Tensor, settings: Settings) -> Tensor:
        """Share out the directions, orthogonalise them, and flatten the spectrum."""
        import torch

        from isthmus.geometry.factored import numerical_rank

        tasks = len(deltas)
        ranks = [numerical_rank(torch.linalg.svdvals(delta)) for delta in deltas]
        total = shared_rank(deltas, ranks)
        fraction = float(cast("float", settings.shared["common_space_fraction"]))
        own = min(round((total - int(total * fraction)) / tasks), total // tasks)
        u, values, v = torch.linalg.svd(deltas.sum(dim=0), full_matrices=False)
        common = min(total - own * tasks, numerical_rank(values))
        left, lengths, right = [u[:, :common]], [values[:common]], [v[:common]]
        for delta in deltas:
            u, values, v = torch.linalg.svd(
                delta - left[0] @ (left[0].mT @ delta), full_matrices=False
            )
            # Beside the task itself: of one that the common space holds only rounding is left.
            kept = min(own, int((values > _negligible(delta)).sum()))
            left.append(u[:, :kept])
            lengths.append(values[:kept])
            right.append(v[:kept])
        if not sum(map(len, lengths)):
            return torch.zeros_like(deltas[0])
        basis = orthogonalized(torch.cat(left, dim=1)) @ orthogonalized(torch.cat(right).mT).mT
        merged: Tensor = torch.cat(lengths).mean() * basis
        return merged


def _negligible(delta: Tensor) -> float:
    from isthmus.geometry.factored import NEGLIGIBLE

    return NEGLIGIBLE * float(delta.norm())


_AFTER = (
    " Tensors that are no matrices are averaged. Adapters are merged in the core, to the same numbers "
    "as in full. A flat spectrum has no best approximation of lower rank: where rank asks for one, the "
    "directions in which the plain sum is largest stay, and the rest is lost, as the share that is kept "
    "tells. Takes decompositions in float64: quick for adapters, slow for large full matrices."
)

ISO_C = IsoC(
    name="iso_c",
    summary="The sum of task vectors with all singular values made equal.",
    reference="Marczak et al. 2025, arXiv 2502.04959, Iso-C",
    explanation=(
        "Adds up the task vectors of each matrix and gives all singular directions of the sum the "
        "mean length, so that directions which few tasks use are heard as well. One model alone "
        "comes back with its spectrum flattened, not as it was." + _AFTER
    ),
    parameters=(WEIGHT, LAMBDA),
    base=BaseUse.REQUIRED,
    reach=Reach.MATRIX,
    spaces=("core",),
    gauge=GAUGE,
)

ISO_CTS = IsoCTS(
    name="iso_cts",
    summary="As iso_c, the weakest directions of the sum replaced by those of single tasks.",
    reference="Marczak et al. 2025, arXiv 2502.04959, Iso-CTS",
    explanation=(
        "Keeps the leading directions of the sum, common_space_fraction of them, fills up with the "
        "leading directions that each task has beside those, and gives all the same length."
        + _AFTER
    ),
    parameters=(
        WEIGHT,
        LAMBDA,
        Parameter(
            "common_space_fraction",
            float,
            Scope.GLOBAL,
            "Share of the directions that the sum gives; the rest come from single tasks.",
            default=0.8,
            minimum=0,
            maximum=1,
        ),
    ),
    base=BaseUse.REQUIRED,
    reach=Reach.MATRIX,
    spaces=("core",),
    gauge=GAUGE,
)
