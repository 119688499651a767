"""Bases that scale task vectors: by expert, by groups of rows or columns, entry by entry.

Δ(d) = Σ_k d⁽ᵏ⁾ ∘ τ_k, where d⁽ᵏ⁾ is constant on the groups of the basis. One group of rows is a scalar per
expert; a group for each row is diag(d⁽ᵏ⁾) τ_k, the diagonal basis of arXiv 2605.29101.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.projection.basis import Basis, fitting, one_block
from isthmus.projection.heuristics import Heuristic
from isthmus.projection.objective import LayerObjective, stacked
from isthmus.projection.quadratic import BlockQuadratic, Quadratic

FORMED = 4096
"""Up to so many unknowns that interact the normal equations are formed."""


class TaskVectorBasis(Basis):
    """Δ(d) = Σ_k d⁽ᵏ⁾ ∘ τ_k.

    Attributes:
        task_vectors: τ_k, shape [K, m, n], float64.
    """

    def __init__(self, task_vectors: Tensor) -> None:
        self.task_vectors = stacked(task_vectors)

    @abstractmethod
    def multipliers(self, d: Tensor) -> Tensor:
        """d⁽ᵏ⁾, of a shape that broadcasts to [K, m, n]."""

    @abstractmethod
    def gathered(self, products: Tensor) -> Tensor:
        """Sums over each group, from [K, m, n] to `shape`."""

    @abstractmethod
    def expert_of(self) -> Tensor:
        """Which expert each coefficient scales, shape [N, n]."""

    @property
    def mixes(self) -> bool:
        """Whether a block has one coefficient for each expert."""
        return self.shape[1] == len(self.task_vectors)

    def correction(self, d: Tensor) -> Tensor:
        """Δ(d), shape [m, n]."""
        total: Tensor = (self.multipliers(d) * self.task_vectors).sum(dim=0)
        return total

    def adjoint(self, matrix: Tensor) -> Tensor:
        """Sums over each group of τ_k ∘ matrix."""
        return self.gathered(self.task_vectors * matrix)

    def point(self, heuristic: Heuristic) -> Tensor:
        """The heuristic's own coefficients where they are constant on groups, else any that serve."""
        tau = self.task_vectors
        given = heuristic.coefficients.to(torch.float64).expand_as(tau)
        # What multiplies a zero does not matter.
        counts = (tau != 0).to(torch.float64)
        d = self.gathered(given * counts) / self.gathered(counts).clamp(min=1)
        spread = ((self.multipliers(d) - given) * counts).abs().max()
        if spread <= 1e-12 * given.abs().max():
            return d
        return self.nearest(heuristic.correction, heuristic.name)

    def unsettled(self, undetermined: Tensor) -> str | None:
        """Which experts' coefficients, and in how many blocks."""
        open_ones = undetermined.cpu()
        blocks = int(open_ones.any(dim=1).sum())
        if not blocks:
            return None
        experts = sorted(set(self.expert_of().expand_as(open_ones)[open_ones].tolist()))
        return (
            f"{int(undetermined.sum())} of {self.dimension} coefficients, in {blocks} of "
            f"{undetermined.shape[0]} blocks, of the experts "
            f"{', '.join(str(expert + 1) for expert in experts)}"
        )


class RowGroups(TaskVectorBasis):
    """One coefficient for each expert and group of output rows: heads, blocks of a fused weight.

    Args:
        task_vectors: Shape [K, m, n].
        groups: The group of each row, shape [m], integers from 0 on.

    Raises:
        MethodError: Bad task vectors or groups.
    """

    def __init__(self, task_vectors: Tensor, groups: Tensor) -> None:
        super().__init__(task_vectors)
        self.groups, self.count = _grouping(groups, self.task_vectors.shape[1], "rows")

    @classmethod
    def scalar(cls, task_vectors: Tensor) -> RowGroups:
        """One coefficient for each expert: contains task arithmetic, soups and linear merges."""
        return cls(task_vectors, torch.zeros(_size(task_vectors, 1), dtype=torch.long))

    @classmethod
    def diagonal(cls, task_vectors: Tensor) -> RowGroups:
        """One coefficient for each expert and output row: Δ = Σ_k diag(d⁽ᵏ⁾) τ_k."""
        return cls(task_vectors, torch.arange(_size(task_vectors, 1)))

    @property
    def shape(self) -> tuple[int, int]:
        """Groups and experts."""
        return self.count, len(self.task_vectors)

    def multipliers(self, d: Tensor) -> Tensor:
        """Shape [K, m, 1]."""
        return d[self.groups].mT.unsqueeze(-1)

    def gathered(self, products: Tensor) -> Tensor:
        """Sums over the rows of each group."""
        return _sums(products.sum(dim=2).mT, self.groups, self.count)

    def expert_of(self) -> Tensor:
        """Shape [1, K]."""
        return torch.arange(len(self.task_vectors)).unsqueeze(0)

    def constants(self, squares: Tensor) -> Tensor:
        """Sums over the rows of each group."""
        return _sums(squares, self.groups, self.count)

    def quadratic(self, objective: LayerObjective) -> BlockQuadratic:
        """A K × K block for each group: A_kl = Σ over its rows of τ_k C τ_lᵀ."""
        tau = self.task_vectors
        fitting(objective, (tau.shape[1], tau.shape[2]))
        # One expert's image at a time: K of them are as large as all task vectors.
        rows = torch.stack(
            [torch.einsum("mn,lmn->ml", expert @ objective.gram, tau) for expert in tau], dim=1
        )
        blocks = _sums(rows, self.groups, self.count)
        return BlockQuadratic(
            (blocks + blocks.mT) / 2,
            self.adjoint(objective.cross),
            self.constants(objective.squares),
        )


class ColumnGroups(TaskVectorBasis):
    """One coefficient for each expert and group of input columns, such as the heads that enter.

    Args:
        task_vectors: Shape [K, m, n].
        groups: The group of each column, shape [n], integers from 0 on.

    Raises:
        MethodError: Bad task vectors or groups.
    """

    def __init__(self, task_vectors: Tensor, groups: Tensor) -> None:
        super().__init__(task_vectors)
        self.groups, self.count = _grouping(groups, self.task_vectors.shape[2], "columns")

    @classmethod
    def diagonal(cls, task_vectors: Tensor) -> ColumnGroups:
        """One coefficient for each expert and input column: Δ = Σ_k τ_k diag(d⁽ᵏ⁾)."""
        return cls(task_vectors, torch.arange(_size(task_vectors, 2)))

    @property
    def shape(self) -> tuple[int, int]:
        """One block: columns interact through C."""
        return 1, len(self.task_vectors) * self.count

    def multipliers(self, d: Tensor) -> Tensor:
        """Shape [K, 1, n]."""
        return d.reshape(len(self.task_vectors), self.count)[:, self.groups].unsqueeze(1)

    def gathered(self, products: Tensor) -> Tensor:
        """Sums over the columns of each group."""
        return _sums(products.sum(dim=1).mT, self.groups, self.count).mT.reshape(1, -1)

    def expert_of(self) -> Tensor:
        """Shape [1, K · groups]."""
        return torch.arange(len(self.task_vectors)).repeat_interleave(self.count).unsqueeze(0)

    def constants(self, squares: Tensor) -> Tensor:
        """The sum."""
        return squares.sum().reshape(1)

    def quadratic(self, objective: LayerObjective) -> Quadratic:
        """One block, A_(k,g),(l,h) = Σ over j in g and j' in h of (τ_kᵀτ_l)_jj' C_jj'."""
        tau = self.task_vectors
        fitting(objective, (tau.shape[1], tau.shape[2]))
        if self.dimension > FORMED:
            return super().quadratic(objective)
        experts = len(tau)
        matrix = tau.new_empty(experts, self.count, experts, self.count)
        for k, left in enumerate(tau):
            for l, right in enumerate(tau):  # noqa: E741
                paired = (left.mT @ right) * objective.gram
                by_row = _sums(paired, self.groups, self.count)
                matrix[k, :, l, :] = _sums(by_row.mT, self.groups, self.count).mT
        return one_block(
            matrix.reshape(self.dimension, self.dimension),
            self.adjoint(objective.cross),
            objective.squares.sum(),
        )


class Elementwise(TaskVectorBasis):
    """One coefficient for each expert and entry; output rows separate.

    With 0 ≤ d ≤ 1 it contains TIES. DARE multiplies what it keeps by 1/density, so that its points need a
    box up to λ/density. Unconstrained, the entries that some expert changed are free: regression. K
    coefficients make one entry, so that they are never unique, but their correction is.

    Args:
        task_vectors: Shape [K, m, n].

    Raises:
        MethodError: Bad task vectors.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and experts times columns."""
        experts, rows, columns = self.task_vectors.shape
        return rows, experts * columns

    def multipliers(self, d: Tensor) -> Tensor:
        """Shape [K, m, n]."""
        experts, rows, columns = self.task_vectors.shape
        return d.reshape(rows, experts, columns).transpose(0, 1)

    def gathered(self, products: Tensor) -> Tensor:
        """The products themselves: every entry is its own group."""
        return products.transpose(0, 1).reshape(self.shape)

    def expert_of(self) -> Tensor:
        """Shape [1, K · n]."""
        experts, _, columns = self.task_vectors.shape
        return torch.arange(experts).repeat_interleave(columns).unsqueeze(0)

    def constants(self, squares: Tensor) -> Tensor:
        """J(0) of each row."""
        return squares

    def curvature(self, diagonal: Tensor) -> Tensor:
        """τ_k² times the diagonal of C."""
        return self.gathered(self.task_vectors.square() * diagonal)

    def closed_form(self, objective: LayerObjective) -> Tensor | None:
        """Regression, shared among the experts by τ_k/Σ τ²; where C is regular and every entry changed."""
        tau = self.task_vectors
        fitting(objective, (tau.shape[1], tau.shape[2]))
        energy = tau.square().sum(dim=0)
        if len(objective.spectrum[0]) < tau.shape[2] or not (energy > 0).all():
            return None
        return self.fitted(objective.regression())

    def fitted(self, delta: Tensor) -> Tensor:
        """Entry by entry, shared among the experts by τ_k/Σ τ²."""
        energy = self.task_vectors.square().sum(dim=0)
        return self.adjoint(torch.where(energy > 0, delta / energy.clamp(min=1e-300), 0.0))

    def quadratic(self, objective: LayerObjective) -> Quadratic:
        """A product: the blocks would take K²n² numbers for each row."""
        fitting(objective, (self.task_vectors.shape[1], self.task_vectors.shape[2]))
        return super().quadratic(objective)

    def unsettled(self, undetermined: Tensor) -> str | None:  # noqa: ARG002
        """None: coefficients of one entry are undetermined by construction, their sum is not."""
        return None


def _size(task_vectors: Tensor, axis: int) -> int:
    return stacked(task_vectors).shape[axis]


def _grouping(groups: Tensor, size: int, axis: str) -> tuple[Tensor, int]:
    """The groups as indices, and how many."""
    whole = not groups.is_floating_point() and tuple(groups.shape) == (size,)
    if not whole or (size and int(groups.min()) < 0):
        raise MethodError(
            f"groups of shape {list(groups.shape)} for {size} {axis}",
            f"give each of the {axis} the number of its group, from 0 on",
        )
    index = groups.to(torch.long)
    return index, int(index.max()) + 1 if size else 0


def _sums(rows: Tensor, groups: Tensor, count: int) -> Tensor:
    """Sums of the rows of each group: [s, ...] to [count, ...]."""
    return rows.new_zeros(count, *rows.shape[1:]).index_add(0, groups.to(rows.device), rows)
