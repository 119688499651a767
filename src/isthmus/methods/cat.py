"""Adapters side by side: the exact sum, at the sum of their ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.errors import MethodError
from isthmus.methods.method import BaseUse, Settings
from isthmus.methods.sparsify import keep_all
from isthmus.methods.task_vectors import LAMBDA, WEIGHT, TaskVectors, normalization

if TYPE_CHECKING:
    from isthmus.geometry.factored import Factored
    from isthmus.methods.adapters import LowRankMerge


@dataclass(frozen=True, kw_only=True)
class Cat(TaskVectors):
    """sum_k c_k B_k A_k = [√c_1 B_1 ... √c_K B_K] [√c_1 A_1; ...; √c_K A_K], and no decomposition.

    What adapters store in full is merged as task arithmetic does.
    """

    def merge_low_rank(
        self, updates: Sequence[Factored], settings: Settings, rank: int
    ) -> LowRankMerge:
        """Concatenate the factors, and pad with zeros up to the rank.

        Raises:
            MethodError: if the rank is below the sum of the ranks.
        """
        from isthmus.geometry.factored import stacked
        from isthmus.methods.adapters import LowRankMerge

        coefficients = self.coefficients(settings)
        assert coefficients is not None
        update = stacked(updates, coefficients)
        if rank < update.rank:
            raise MethodError(
                f"cat keeps all directions of the adapters, which are {update.rank}; rank {rank} "
                "has no room for them",
                "Leave rank out, or take linear or task_arithmetic, which compress the sum.",
            )
        return LowRankMerge(update.padded(rank), 1.0)


CAT = Cat(
    name="cat",
    summary="Adapters side by side: the exact weighted sum, at the sum of their ranks.",
    reference="PEFT's combination type cat; the sum of Ilharco et al. 2023, arXiv 2212.04089",
    explanation=(
        "Puts the factors of all adapters next to each other, so that their product is the "
        "weighted sum of the updates to the last digit. The rank of the result is the sum of the "
        "ranks. task_arithmetic gives the best approximation of this sum at a rank that you "
        "choose."
    ),
    parameters=(WEIGHT, LAMBDA, normalization(default=False)),
    base=BaseUse.REQUIRED,
    spaces=("core",),
    adapters_only=True,
    compresses=False,
    adds_ranks=True,
    gauge=(
        "The merged update does not depend on the factorisation; its factors do, since they are "
        "the adapters' own."
    ),
    sparsifier=keep_all,
    consensus=False,
)
