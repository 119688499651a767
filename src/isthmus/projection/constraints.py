"""What the coefficients of a projection may be: anything, non-negative, in a box, on a simplex."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.errors import MethodError


@dataclass(frozen=True, slots=True)
class Constraint:
    """lower ≤ d ≤ upper for every coefficient and, if a total is given, Σ d = total in every block.

    Attributes:
        lower: May be −∞.
        upper: May be ∞.
        total: Positive; only with lower = 0 and no upper bound: a simplex.

    Raises:
        MethodError: No coefficients satisfy it, or a total with other bounds.
    """

    lower: float = -math.inf
    upper: float = math.inf
    total: float | None = None

    def __post_init__(self) -> None:
        if not self.lower <= self.upper or self.lower == math.inf or self.upper == -math.inf:
            raise MethodError(
                f"no coefficient lies between {self.lower} and {self.upper}",
                "give a lower bound that is at most the upper bound",
            )
        if self.total is None:
            return
        if not 0 < self.total < math.inf:
            raise MethodError(f"coefficients that sum to {self.total}", "give a positive total")
        if self.lower != 0 or self.upper != math.inf:
            raise MethodError(
                "a total is only supported on a simplex", "leave out the bounds, or the total"
            )

    @property
    def free(self) -> bool:
        """Whether it constrains nothing."""
        return self.lower == -math.inf and self.upper == math.inf

    def project(self, d: Tensor) -> Tensor:
        """The nearest coefficients that satisfy it, shape [N, n].

        On the simplex they are max(d − θ, 0), with θ from the sorted coefficients (Duchi et al. 2008,
        Efficient projections onto the ℓ1-ball).
        """
        if self.total is None:
            return d.clamp(self.lower, self.upper)
        descending = d.sort(dim=1, descending=True).values
        excess = descending.cumsum(dim=1) - self.total
        count = torch.arange(1, d.shape[1] + 1, dtype=d.dtype, device=d.device)
        support = (descending * count > excess).sum(dim=1, keepdim=True).clamp(min=1)
        threshold = excess.gather(1, support - 1) / support
        nearest: Tensor = (d - threshold).clamp(min=0)
        return nearest

    def contains(self, d: Tensor, tolerance: float = 1e-9) -> bool:
        """Whether coefficients of shape [N, n] satisfy it but for rounding."""
        return bool(((d - self.project(d)).abs() <= tolerance * (1 + d.abs())).all())


FREE = Constraint()
NON_NEGATIVE = Constraint(lower=0)
SIMPLEX = Constraint(lower=0, total=1)


def box(lower: float = 0, upper: float = 1) -> Constraint:
    """Every coefficient between two bounds."""
    return Constraint(lower, upper)
