"""Permutations of units, with or without a factor for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from isthmus.symmetry.group import Crosses, Group

Factors = Literal["one", "sign", "positive", "nonzero"]

_SPREAD = 0.5


class Reordered(NamedTuple):
    """An element: unit i of the result is unit order[i] of the argument, times factors[i].

    Attributes:
        order: Shape [n], int64, a permutation.
        factors: Shape [n], float64, none zero.
    """

    order: Tensor
    factors: Tensor


class Monomial(Group[Reordered]):
    """Matrices with one entry in each row and column: ρ(g) = diag(factors) P.

    Which factors are allowed depends on what the units do: 1 behind a GELU or a LayerNorm, ±1 in a stream
    that RMSNorm reads with gains, positive ones around a ReLU, any but 0 between the two factors of a
    gated MLP (SwiGLU: the linear branch is ``vector``, the gate ``gain``, the output ``dual``).
    ``gain`` is permuted alone.

    Args:
        units: n.
        factors: Which are allowed.
        permuted: Whether units change places; False leaves the diagonal group.
    """

    roles = frozenset({"vector", "dual", "gain"})

    def __init__(self, units: int, factors: Factors = "one", *, permuted: bool = True) -> None:
        self.units = units
        self.factors = factors
        self.permuted = permuted
        self.compact = factors in ("one", "sign")
        self.balance_needs = "nothing" if self.compact else "diagonal"

    def __repr__(self) -> str:
        return f"Monomial({self.units}, {self.factors!r}, permuted={self.permuted})"

    def size(self, role: str) -> int:
        """The number of units, in every role."""
        del role
        return self.units

    def identity(self) -> Reordered:
        """Units where they are, factors 1."""
        return Reordered(torch.arange(self.units), torch.ones(self.units, dtype=torch.float64))

    def random(self, generator: torch.Generator) -> Reordered:
        """A uniform permutation, fair signs, log-normal sizes, as far as they are allowed."""
        order, factors = self.identity()
        if self.permuted:
            order = torch.randperm(self.units, generator=generator)
        if self.factors in ("positive", "nonzero"):
            drawn = torch.randn(self.units, generator=generator, dtype=torch.float64)
            factors = (_SPREAD * drawn).exp()
        if self.factors in ("sign", "nonzero"):
            factors = factors * (2 * torch.randint(2, (self.units,), generator=generator) - 1)
        return Reordered(order, factors)

    def compose(self, g: Reordered, h: Reordered) -> Reordered:
        """The element that acts as h and then g."""
        return Reordered(h.order[g.order], g.factors * h.factors[g.order])

    def inverse(self, g: Reordered) -> Reordered:
        """The element that undoes g."""
        order = torch.argsort(g.order)
        return Reordered(order, 1 / g.factors[order])

    def act(self, g: Reordered, rows: Tensor, role: str) -> Tensor:
        """Rows in another order, times the factors (``vector``) or their inverses (``dual``)."""
        stays = not self.permuted or torch.equal(g.order, torch.arange(self.units))
        moved = rows if stays else rows[g.order]
        if role == "gain" or self.factors == "one":
            return moved
        factors = g.factors if role == "vector" else 1 / g.factors
        return (moved * factors.to(moved).reshape(-1, *(1 for _ in moved.shape[1:]))).to(rows.dtype)

    def match(self, crosses: Crosses) -> Reordered:
        """Linear assignment; with signs on |C|, whose signs then are those of the entries chosen."""
        signed = sum(
            (crosses[role] for role in ("vector", "dual") if role in crosses),
            start=torch.zeros(self.units, self.units, dtype=torch.float64),
        )
        signs_free = self.factors in ("sign", "nonzero")
        worth = signed.abs() if signs_free else signed
        if "gain" in crosses:
            worth = worth + crosses["gain"]
        order, factors = self.identity()
        if self.permuted:
            order = torch.from_numpy(linear_sum_assignment(worth.numpy(), maximize=True)[1])
        if signs_free:
            chosen = signed[torch.arange(self.units), order]
            factors = torch.where(chosen < 0, -factors, factors)
        return Reordered(order, factors)

    def score(self, g: Reordered, crosses: Crosses) -> float:
        """Σ of the entries of C where ρ(g) has its own, times them."""
        units = torch.arange(self.units)
        total = 0.0
        for role, cross in crosses.items():
            entries = self.act(Reordered(units, g.factors), torch.ones_like(g.factors), role)
            total += float((cross[units, g.order] * entries).sum())
        return total

    def balance(self, squares: Mapping[str, Tensor]) -> Reordered:
        """Factors with which every unit's vectors and duals have the same norm.

        A unit that has no vector or no dual keeps the factor 1: no factor is best for it.
        """
        order, factors = self.identity()
        if self.compact:
            return Reordered(order, factors)
        vector, dual = squares["vector"], squares["dual"]
        free = (vector > 0) & (dual > 0)
        ratio = torch.where(free, dual, 1.0) / torch.where(free, vector, 1.0)
        return Reordered(order, ratio**0.25)
