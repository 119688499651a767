"""The convex quadratic J(d) = dᵀAd + 2bᵀd + c that every projection minimises.

J is ‖A_j d + b_j‖² summed over the calibration examples j (Model Merging by Output-Space Projection,
arXiv 2605.29101), so A is positive semidefinite and J is never negative. Where the unknowns separate,
d is a batch of blocks and J the sum over them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.errors import MethodError


class ProjectionWarning(UserWarning):
    """A projection that is returned although calibration does not settle it, or a solver has not."""


class Quadratic(ABC):
    """J(d) = Σ over blocks of dᵀAd + 2bᵀd + c, for d of shape [N, n].

    Attributes:
        linear: b, shape [N, n], float64.
        constant: c, shape [N], float64: J(0) by block.
    """

    linear: Tensor
    constant: Tensor

    @abstractmethod
    def product(self, d: Tensor) -> Tensor:
        """A d block by block, shape [N, n]."""

    def diagonal(self) -> Tensor | None:
        """The diagonal of A, shape [N, n], or None where it would have to be formed."""
        return None

    @property
    def shape(self) -> tuple[int, int]:
        """Blocks and unknowns of a block."""
        blocks, unknowns = self.linear.shape
        return blocks, unknowns

    def values(self, d: Tensor) -> Tensor:
        """J(d) by block, shape [N]; rounding may leave −1e-16 of J(0) where it vanishes."""
        values: Tensor = (d * (self.product(d) + 2 * self.linear)).sum(dim=1) + self.constant
        return values

    def formed(self) -> BlockQuadratic:
        """The same with A as matrices, from n products."""
        blocks, n = self.shape
        matrix = self.linear.new_empty(blocks, n, n)
        for column in range(n):
            unit = torch.zeros_like(self.linear)
            unit[:, column] = 1
            matrix[:, :, column] = self.product(unit)
        return BlockQuadratic((matrix + matrix.mT) / 2, self.linear, self.constant)


@dataclass(frozen=True, eq=False)
class BlockQuadratic(Quadratic):
    """A quadratic whose matrices are held.

    Attributes:
        matrix: A, shape [N, n, n], or [1, n, n] where all blocks share it; symmetric, positive
            semidefinite, float64.
        linear: b, shape [N, n].
        constant: c, shape [N].

    Raises:
        MethodError: Shapes that do not fit, NaN or infinity.
    """

    matrix: Tensor
    linear: Tensor
    constant: Tensor

    def __post_init__(self) -> None:
        blocks, n = self.linear.shape
        fits = (
            self.matrix.ndim == 3
            and self.matrix.shape[0] in (1, blocks)
            and tuple(self.matrix.shape[1:]) == (n, n)
            and tuple(self.constant.shape) == (blocks,)
        )
        if not fits:
            raise MethodError(
                f"quadratic: matrices {list(self.matrix.shape)}, linear terms "
                f"{list(self.linear.shape)} and constants {list(self.constant.shape)} do not fit",
                "give shapes [N, n, n], [N, n] and [N]",
            )
        for name, part in (("matrix", self.matrix), ("linear term", self.linear)):
            if not torch.isfinite(part).all():
                raise MethodError(
                    f"quadratic: NaN or infinity in the {name}",
                    "leave out the expert or the calibration examples that brought it",
                )

    def product(self, d: Tensor) -> Tensor:
        """A d block by block."""
        if len(self.matrix) == 1:
            shared: Tensor = d @ self.matrix[0]
            return shared
        image: Tensor = (self.matrix @ d.unsqueeze(-1)).squeeze(-1)
        return image

    def diagonal(self) -> Tensor:
        """The diagonals, shape [N, n]."""
        return torch.diagonal(self.matrix, dim1=1, dim2=2).expand(self.shape)

    def formed(self) -> BlockQuadratic:
        """Itself."""
        return self

    def only(self, blocks: Tensor) -> BlockQuadratic:
        """Those blocks that a mask of shape [N] selects."""
        matrix = self.matrix if len(self.matrix) == 1 else self.matrix[blocks]
        return BlockQuadratic(matrix, self.linear[blocks], self.constant[blocks])
