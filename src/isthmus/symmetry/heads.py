"""Attention heads in key-value groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from isthmus.symmetry.group import Crosses, Group

_ALL_ORDERS = 6
"""Up to so many orders of the query heads of a group, all are tried."""

_ALTERNATIONS = 20


class HeadsMoved(NamedTuple):
    """An element: group i of the result is group `order[i]` of the argument.

    Attributes:
        order: Shape [G], int64, a permutation of the groups.
        heads: Shape [G, q], int64: head j of group i of the result is head `heads[i, j]` of its
            source group.
        key: For every group of the result an element that acts on keys and queries.
        value: The same for values and outputs.
    """

    order: Tensor
    heads: Tensor
    key: tuple[Any, ...]
    value: tuple[Any, ...]


class Heads(Group[HeadsMoved]):
    """The wreath product of groups of heads, of heads inside a group, and of their coordinates.

    Every group has one head of keys and values and q heads of queries (grouped-query attention;
    Ainslie et al. 2023, arXiv 2305.13245; q = 1: one of each). An element of `key` acts on its keys
    (``vector``) and on the q heads of queries (``dual``), one of `value` on its values (``vector``) and
    on the columns of the output matrix (``dual``).

    The roles, in order group, head, coordinate: ``query`` [G·q·d_k], ``key`` [G·d_k], ``value``
    [G·d_v], ``output`` [G·q·d_v].

    Args:
        groups: G.
        queries: q.
        key: The group of keys and queries, with roles ``vector`` and ``dual``.
        value: The group of values and outputs.
        permuted: Whether groups, and heads inside them, change places.
    """

    roles = frozenset({"query", "key", "value", "output"})

    def __init__(
        self,
        groups: int,
        queries: int,
        key: Group[Any],
        value: Group[Any],
        *,
        permuted: bool = True,
    ) -> None:
        self.groups = groups
        self.queries = queries
        self.key = key
        self.value = value
        self.permuted = permuted
        self.compact = key.compact and value.compact
        needs = {key.balance_needs, value.balance_needs}
        self.balance_needs = (
            "gram" if "gram" in needs else "diagonal" if "diagonal" in needs else "nothing"
        )

    def __repr__(self) -> str:
        places = "" if self.permuted else ", permuted=False"
        return f"Heads({self.groups}, {self.queries}, {self.key!r}, {self.value!r}{places})"

    def size(self, role: str) -> int:
        """The number of heads times their size."""
        inner, per_group, _ = self._part(role)
        return self.groups * per_group * inner.size("vector")

    def _part(self, role: str) -> tuple[Group[Any], int, str]:
        """The inner group of a role, heads in a group of heads, and the inner role."""
        inner = self.key if role in ("query", "key") else self.value
        if role in ("query", "output"):
            return inner, self.queries, "dual"
        return inner, 1, "vector"

    def identity(self) -> HeadsMoved:
        """Heads where they are."""
        return HeadsMoved(
            torch.arange(self.groups),
            torch.arange(self.queries).repeat(self.groups, 1),
            tuple(self.key.identity() for _ in range(self.groups)),
            tuple(self.value.identity() for _ in range(self.groups)),
        )

    def random(self, generator: torch.Generator) -> HeadsMoved:
        """Uniform permutations, as far as they are allowed, and random inner elements."""
        order, heads, _, _ = self.identity()
        if self.permuted:
            order = torch.randperm(self.groups, generator=generator)
            heads = torch.stack(
                [torch.randperm(self.queries, generator=generator) for _ in range(self.groups)]
            )
        return HeadsMoved(
            order,
            heads,
            tuple(self.key.random(generator) for _ in range(self.groups)),
            tuple(self.value.random(generator) for _ in range(self.groups)),
        )

    def compose(self, g: HeadsMoved, h: HeadsMoved) -> HeadsMoved:
        """The element that acts as h and then g."""
        source = g.order.tolist()
        return HeadsMoved(
            h.order[g.order],
            torch.gather(h.heads[g.order], 1, g.heads),
            tuple(self.key.compose(g.key[i], h.key[s]) for i, s in enumerate(source)),
            tuple(self.value.compose(g.value[i], h.value[s]) for i, s in enumerate(source)),
        )

    def inverse(self, g: HeadsMoved) -> HeadsMoved:
        """The element that undoes g."""
        order = torch.argsort(g.order)
        target = order.tolist()
        return HeadsMoved(
            order,
            torch.argsort(g.heads[order], dim=1),
            tuple(self.key.inverse(g.key[i]) for i in target),
            tuple(self.value.inverse(g.value[i]) for i in target),
        )

    def act(self, g: HeadsMoved, rows: Tensor, role: str) -> Tensor:
        """Heads to their places, and the inner elements on their coordinates."""
        inner, per_group, inner_role = self._part(role)
        elements = g.key if role in ("query", "key") else g.value
        blocks = rows.reshape(self.groups, per_group, -1, *rows.shape[1:])[g.order]
        moved = []
        for i, element in enumerate(elements):
            block = blocks[i] if per_group == 1 else blocks[i][g.heads[i]]
            moved.append(inner.act(element, block.movedim(0, 1), inner_role).movedim(1, 0))
        return torch.stack(moved).reshape(rows.shape)

    def balance(self, squares: Mapping[str, Tensor]) -> HeadsMoved:
        """The inner balance of every group; heads stay where they are."""
        order, heads, _, _ = self.identity()
        keys, values = [], []
        for i in range(self.groups):
            keys.append(self.key.balance(self._inner_squares(squares, i, "key", "query")))
            values.append(self.value.balance(self._inner_squares(squares, i, "value", "output")))
        return HeadsMoved(order, heads, tuple(keys), tuple(values))

    def _inner_squares(
        self, squares: Mapping[str, Tensor], i: int, vector: str, dual: str
    ) -> dict[str, Tensor]:
        inner, _, _ = self._part(vector)
        if inner.balance_needs == "nothing":
            return {}
        n = inner.size("vector")
        found = {}
        for role, inner_role, per_group in (
            (vector, "vector", 1),
            (dual, "dual", self.queries),
        ):
            square = squares[role]
            if inner.balance_needs == "diagonal" or square.ndim == 1:
                diagonal = square if square.ndim == 1 else square.diagonal()
                found[inner_role] = diagonal.reshape(self.groups, per_group, n)[i].sum(dim=0)
            else:
                blocks = square.reshape(self.groups, per_group, n, self.groups, per_group, n)
                found[inner_role] = torch.einsum("hihj->ij", blocks[i, :, :, i])
        return found

    def match(self, crosses: Crosses) -> HeadsMoved:
        """Linear assignment of groups by what each pair is worth at its best.

        Inside a pair, heads of queries and inner elements are found in turn: by all orders of heads
        if there are few, which is exact, and otherwise alternately from two starts.
        """
        blocks = _Blocks(self, crosses)
        if not self.permuted:
            found = [
                blocks.best(i, i, [list(range(self.queries))], moves=False)
                for i in range(self.groups)
            ]
            return self._collected(list(range(self.groups)), found)
        pairs = [
            [blocks.best(i, s, blocks.starts(i, s), moves=True) for s in range(self.groups)]
            for i in range(self.groups)
        ]
        worth = [[pair.worth for pair in row] for row in pairs]
        source = linear_sum_assignment(worth, maximize=True)[1].tolist()
        return self._collected(source, [pairs[i][s] for i, s in enumerate(source)])

    def _collected(self, source: list[int], found: list[_Pair]) -> HeadsMoved:
        return HeadsMoved(
            torch.tensor(source),
            torch.tensor([pair.heads for pair in found]),
            tuple(pair.key for pair in found),
            tuple(pair.value for pair in found),
        )

    def score(self, g: HeadsMoved, crosses: Crosses) -> float:
        """Σ over groups of what each is worth with its source."""
        blocks = _Blocks(self, crosses)
        return sum(
            blocks.worth(i, int(g.order[i]), g.heads[i].tolist(), g.key[i], g.value[i])
            for i in range(self.groups)
        )


class _Pair(NamedTuple):
    """A group of heads and its source: the best elements found, and what they are worth."""

    worth: float
    heads: list[int]
    key: Any
    value: Any


class _Blocks:
    """Crosses by pairs of groups."""

    def __init__(self, heads: Heads, crosses: Crosses) -> None:
        self.heads = heads
        self.by_role = {}
        for role, cross in crosses.items():
            inner, per_group, _ = heads._part(role)
            shape = (heads.groups, per_group, inner.size("vector"))
            # [G, head, n, G, head, n] → [G, G, head, head, n, n]
            self.by_role[role] = cross.reshape(*shape, *shape).permute(0, 3, 1, 4, 2, 5)

    def inner(self, i: int, s: int, order: list[int], vector: str, dual: str) -> dict[str, Tensor]:
        """The crosses of an inner element, given the order of the heads of queries."""
        found = {}
        if vector in self.by_role:
            found["vector"] = self.by_role[vector][i, s, 0, 0]
        if dual in self.by_role:
            found["dual"] = self.by_role[dual][i, s, list(range(len(order))), order].sum(dim=0)
        return found

    def worth(self, i: int, s: int, order: list[int], key: Any, value: Any) -> float:
        """Σ ⟨C, ρ⟩ over all roles of a pair."""
        keys = self.inner(i, s, order, "key", "query")
        values = self.inner(i, s, order, "value", "output")
        return self.heads.key.score(key, keys) + self.heads.value.score(value, values)

    def starts(self, i: int, s: int) -> list[list[int]]:
        """Orders of the heads of queries from which to begin."""
        queries = self.heads.queries
        if math.factorial(queries) <= _ALL_ORDERS:
            return [list(order) for order in itertools.permutations(range(queries))]
        # Inner elements from keys and values alone need no order; nuclear norms bound every pair.
        key = self.heads.key.match(self._only(i, s, "key"))
        value = self.heads.value.match(self._only(i, s, "value"))
        bounds = torch.zeros(queries, queries, dtype=torch.float64)
        for role in ("query", "output"):
            if role in self.by_role:
                bounds += torch.linalg.svdvals(self.by_role[role][i, s]).sum(dim=-1)
        return [self.order(i, s, key, value), _assigned(bounds)]

    def _only(self, i: int, s: int, role: str) -> dict[str, Tensor]:
        return {"vector": self.by_role[role][i, s, 0, 0]} if role in self.by_role else {}

    def order(self, i: int, s: int, key: Any, value: Any) -> list[int]:
        """The best order of the heads of queries, given the inner elements."""
        queries = self.heads.queries
        worth = torch.zeros(queries, queries, dtype=torch.float64)
        for role, inner, element in (
            ("query", self.heads.key, key),
            ("output", self.heads.value, value),
        ):
            if role in self.by_role:
                unit = torch.eye(inner.size("dual"), dtype=torch.float64)
                moved = inner.act(element, unit, "dual")
                worth += (self.by_role[role][i, s] * moved).sum(dim=(-2, -1))
        return _assigned(worth)

    def best(self, i: int, s: int, starts: list[list[int]], *, moves: bool) -> _Pair:
        """The best of what is found from the given orders."""
        exhaustive = not moves or len(starts) == math.factorial(self.heads.queries)
        return max(
            (self._climbed(i, s, order, 1 if exhaustive else _ALTERNATIONS) for order in starts),
            key=lambda pair: pair.worth,
        )

    def _climbed(self, i: int, s: int, order: list[int], rounds: int) -> _Pair:
        for _ in range(rounds):
            used = order
            key = self.heads.key.match(self.inner(i, s, used, "key", "query"))
            value = self.heads.value.match(self.inner(i, s, used, "value", "output"))
            if rounds == 1:
                break
            order = self.order(i, s, key, value)
            if order == used:
                break
        return _Pair(self.worth(i, s, used, key, value), used, key, value)


def _assigned(worth: Tensor) -> list[int]:
    columns: list[int] = linear_sum_assignment(worth.numpy(), maximize=True)[1].tolist()
    return columns
