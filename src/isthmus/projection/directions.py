"""Bases of explicit directions: given matrices, or given output directions."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.projection.basis import Basis, fitting, one_block
from isthmus.projection.objective import LayerObjective, stacked
from isthmus.projection.quadratic import BlockQuadratic


class Directions(Basis):
    """Δ(d) = Σ_c d_c B_c for given matrices.

    Args:
        matrices: B_c, shape [p, m, n].

    Raises:
        MethodError: Another shape, NaN or infinity.
    """

    def __init__(self, matrices: Tensor) -> None:
        self.matrices = stacked(matrices)

    @property
    def shape(self) -> tuple[int, int]:
        """One block of p."""
        return 1, len(self.matrices)

    def correction(self, d: Tensor) -> Tensor:
        """Δ(d), shape [m, n]."""
        total: Tensor = torch.tensordot(d[0], self.matrices, dims=1)
        return total

    def adjoint(self, matrix: Tensor) -> Tensor:
        """⟨B_c, matrix⟩."""
        return torch.einsum("cmn,mn->c", self.matrices, matrix).unsqueeze(0)

    def constants(self, squares: Tensor) -> Tensor:
        """The sum."""
        return squares.sum().reshape(1)

    def quadratic(self, objective: LayerObjective) -> BlockQuadratic:
        """One block, A_cd = ⟨B_c C, B_d⟩."""
        b = self.matrices
        fitting(objective, (b.shape[1], b.shape[2]))
        rows = [torch.einsum("mn,cmn->c", one @ objective.gram, b) for one in b]
        return one_block(torch.stack(rows), self.adjoint(objective.cross), objective.squares.sum())


class OutputDirections(Basis):
    """Δ = UM, all matrices whose outputs lie in the span of U; the coefficients are M.

    Args:
        directions: U, shape [m, r], orthonormal columns.
        columns: n.

    Raises:
        MethodError: U is not orthonormal.
    """

    def __init__(self, directions: Tensor, columns: int) -> None:
        u = directions.to(torch.float64)
        identity = torch.eye(u.shape[1], dtype=torch.float64, device=u.device)
        if not torch.allclose(u.mT @ u, identity, atol=1e-8):
            raise MethodError(
                "output directions that are not orthonormal", "take the Q of torch.linalg.qr"
            )
        self.directions, self.columns = u, columns

    @property
    def shape(self) -> tuple[int, int]:
        """A block of n for each direction."""
        return self.directions.shape[1], self.columns

    @property
    def mixes(self) -> bool:
        """No: a block is a row of M."""
        return False

    def correction(self, d: Tensor) -> Tensor:
        """U M, shape [m, n]."""
        product: Tensor = self.directions @ d
        return product

    def adjoint(self, matrix: Tensor) -> Tensor:
        """Uᵀ times the matrix."""
        product: Tensor = self.directions.mT @ matrix
        return product

    def constants(self, squares: Tensor) -> Tensor:
        """J(0) in equal parts: what lies outside U belongs to no block."""
        rank = self.directions.shape[1]
        return (squares.sum() / rank).expand(rank)

    def quadratic(self, objective: LayerObjective) -> BlockQuadratic:
        """All blocks share the matrix C."""
        fitting(objective, (self.directions.shape[0], self.columns))
        return BlockQuadratic(
            objective.gram.unsqueeze(0),
            self.adjoint(objective.cross),
            self.constants(objective.squares),
        )
