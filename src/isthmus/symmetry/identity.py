"""The group of one element, for parts of a product on which nothing acts."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.symmetry.group import Crosses, Group


class Identity(Group[None]):
    """Nothing moves.

    Args:
        n: Length of the axis.
    """

    roles = frozenset({"vector", "dual", "gain"})
    compact = True

    def __init__(self, n: int) -> None:
        self.n = n

    def __repr__(self) -> str:
        return f"Identity({self.n})"

    def size(self, role: str) -> int:
        """The length of the axis, in every role."""
        del role
        return self.n

    def identity(self) -> None:
        """The element."""

    def random(self, generator: torch.Generator) -> None:
        """The element."""
        del generator

    def compose(self, g: None, h: None) -> None:
        """The element."""
        del g, h

    def inverse(self, g: None) -> None:
        """The element."""
        del g

    def act(self, g: None, rows: Tensor, role: str) -> Tensor:
        """The rows as they are."""
        del g, role
        return rows

    def match(self, crosses: Crosses) -> None:
        """The element."""
        del crosses
