"""What a group that acts on an axis can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor

E = TypeVar("E")
"""Elements of a group: a tensor or a tuple of tensors, in float64 where they are numbers."""

Crosses = Mapping[str, Tensor]
"""By role, a matrix [n, n] with n = `size(role)`: Σ A Bᵀ over tensors A, B with the axis as rows."""


class Group(ABC, Generic[E]):
    """Invertible changes of coordinates of one axis of a network, and how tensors follow them.

    Coordinates h on the axis become ρ(g)h. A dimension of a tensor that lies on the axis follows in
    one of several *roles*, each a linear representation of the group:

    - ``vector``: entries are coordinates (outputs of a layer, biases): x → ρ(g)x;
    - ``dual``: entries read coordinates (inputs of a layer): x → ρ(g)⁻ᵀx, so that x·h stays;
    - ``gain``: entries multiply coordinates one by one (gains of a norm, variances).

    Groups of attention heads have roles of their own.

    Attributes:
        roles: Those that this group knows.
        compact: Whether ρ is orthogonal in every role, so that actions keep norms.
        balance_needs: What `balance` reads of each role: nothing, the diagonal of ΣAAᵀ, or all of it.
    """

    roles: frozenset[str]
    compact: bool
    balance_needs: Literal["nothing", "diagonal", "gram"] = "nothing"

    @abstractmethod
    def size(self, role: str) -> int:
        """The length of a dimension in that role."""

    @abstractmethod
    def identity(self) -> E:
        """The element that changes nothing."""

    @abstractmethod
    def random(self, generator: torch.Generator) -> E:
        """A random element, well-conditioned where the group is not compact."""

    @abstractmethod
    def compose(self, g: E, h: E) -> E:
        """The element that acts as h and then g."""

    @abstractmethod
    def inverse(self, g: E) -> E:
        """The element that undoes g."""

    @abstractmethod
    def act(self, g: E, rows: Tensor, role: str) -> Tensor:
        """The tensor after g.

        Args:
            g: An element.
            rows: Shape [n, ...] with n = `size(role)`: the axis comes first.
            role: How the tensor follows.

        Returns:
            The same shape and dtype.
        """

    @abstractmethod
    def match(self, crosses: Crosses) -> E:
        """The element of the maximal compact subgroup with the largest Σ_role ⟨C_role, ρ_role(g)⟩.

        With C = Σ ABᵀ this is the element that moves the tensors B nearest to the tensors A (linear
        assignment, Procrustes); with one role and C a matrix, the element nearest to the matrix.

        Args:
            crosses: C in float64 for some of the roles; the others count as 0.
        """

    def balance(self, squares: Mapping[str, Tensor]) -> E:
        """The element after which the tensors on the axis have the least sum of squares.

        On an orbit the tensors of least norm are unique up to the maximal compact subgroup (Kempf and
        Ness 1979, The length of vectors in representation spaces), so that two networks, once balanced,
        differ by an element that `match` can find. Compact groups have nothing to balance.

        Args:
            squares: By role, Σ AAᵀ [n, n] or its diagonal [n], in float64, as `balance_needs` says.
        """
        del squares
        return self.identity()

    def score(self, g: E, crosses: Crosses) -> float:
        """Σ_role ⟨C_role, ρ_role(g)⟩, which `match` makes largest."""
        total = 0.0
        for role, cross in crosses.items():
            # ⟨C, ρ⟩ = tr ρᵀC, and ρ(g)ᵀC = (ρ(g)⁻ᵀ)⁻¹C; acting on the identity gives ρ itself.
            moved = self.act(g, torch.eye(cross.shape[0], dtype=cross.dtype), role)
            total += float((moved * cross).sum())
        return total
