"""The distance between a merged network's outputs and the experts', and its derivatives by the coefficients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from isthmus.models.listening import Batch
from isthmus.projection.quadratic import BlockQuadratic

Parameters: TypeAlias = Mapping[str, Tensor]

Outputs: TypeAlias = Callable[[Parameters, Batch], Tensor]
"""Parameters and a batch to outputs of shape [T, n], differentiable; T may differ between batches."""

SLICE = 1 << 16
"""So many entries of an output go into a product in float64 at once."""


@dataclass(frozen=True, slots=True)
class Task:
    """What the network shall give on one expert's examples.

    Attributes:
        batches: The examples.
        targets: The expert's outputs on each batch, shape [T, n].
        weight: What a squared error counts.
    """

    batches: Sequence[Batch]
    targets: Sequence[Tensor]
    weight: float


class OutputObjective:
    """J(d) = Σ over tasks and examples of ω ‖f(θ(d)) − y‖², θ(d) = θ₀ + Σ_k d_k τ_k group by group.

    A coefficient d_gk moves the parameters of group g along the task vector of expert k. Parameters in no
    group stay as they are in the base.

    Args:
        outputs: f.
        base: θ₀ by name.
        experts: θ₀ + τ_k, of the same shapes.
        groups: The names in each of G groups.
        tasks: Of each expert.

    Attributes:
        shape: G and K; d has shape [G · K], the coefficients of a group side by side.
        moving: Which coefficients move anything, shape [G · K]: not those of experts that equal the base.
    """

    def __init__(
        self,
        outputs: Outputs,
        base: Parameters,
        experts: Sequence[Parameters],
        groups: Sequence[Sequence[str]],
        tasks: Sequence[Task],
    ) -> None:
        self._outputs, self._base, self._experts = outputs, base, experts
        self._groups, self._tasks = groups, tasks
        self.shape = len(groups), len(experts)
        self.moving = torch.tensor(
            [
                any(not torch.equal(expert[name], base[name]) for name in group)
                for group in groups
                for expert in experts
            ]
        )

    def parameters(self, d: Tensor) -> dict[str, Tensor]:
        """θ(d) by name."""
        merged = dict(self._base)
        for group, own in zip(self._groups, d.view(self.shape).tolist(), strict=True):
            for name in group:
                # Not base + Σ dτ: so the base and a lone expert come back to the last bit.
                value = (1 - sum(own)) * self._base[name]
                for share, expert in zip(own, self._experts, strict=True):
                    value.add_(expert[name], alpha=share)
                merged[name] = value
        return merged

    @torch.no_grad()
    def value(self, d: Tensor) -> float:
        """J(d), as the network gives it."""
        merged = self.parameters(d)
        total = 0.0
        for task in self._tasks:
            for batch, target in zip(task.batches, task.targets, strict=True):
                error = (self._outputs(merged, batch) - target).to(torch.float64)
                total += task.weight * float(error.square().sum())
        return total

    def gradient(self, d: Tensor) -> Tensor:
        """Half the gradient of J at d, shape [G · K], float64: a backward pass for each batch."""
        merged = self.parameters(d)
        names = [name for group in self._groups for name in group]
        leaves = [merged[name].requires_grad_() for name in names]
        slopes = {name: torch.zeros_like(leaf) for name, leaf in zip(names, leaves, strict=True)}
        for task in self._tasks:
            for batch, target in zip(task.batches, task.targets, strict=True):
                outputs = self._outputs(merged, batch)
                back = torch.autograd.grad(
                    outputs, leaves, task.weight * (outputs.detach() - target), allow_unused=True
                )
                for name, slope in zip(names, back, strict=True):
                    if slope is not None:
                        slopes[name] += slope
        gradient = torch.zeros(self.shape, dtype=torch.float64)
        for g, group in enumerate(self._groups):
            for k, expert in enumerate(self._experts):
                for name in group:
                    along = (expert[name] - self._base[name]).to(torch.float64)
                    gradient[g, k] += (along * slopes[name].to(torch.float64)).sum()
        return gradient.view(-1)

    @torch.no_grad()
    def linearised(self, d: Tensor, step: Callable[[], None] = lambda: None) -> BlockQuadratic:
        """J with f replaced by its linearisation at d, as a function of the coefficients themselves.

        One Jacobian-vector product for each coefficient and batch. Held at once are those of one batch,
        [G · K + 1, T · n] numbers.

        Args:
            d: Shape [G · K].
            step: Is called after every product.

        Raises:
            MethodError: NaN or infinity among the derivatives.
        """
        merged = self.parameters(d)
        size = len(d) + 1
        gram = torch.zeros(size, size, dtype=torch.float64)
        for task in self._tasks:
            for batch, target in zip(task.batches, task.targets, strict=True):
                rows = self._rows(merged, batch, target, step)
                for part in torch.split(rows, SLICE, dim=1):
                    wide = part.to(torch.float64)
                    gram.addmm_(wide, wide.mT, alpha=task.weight)
        # The rows are J and then r, so that their Gram matrix is [[A, b], [bᵀ, c]].
        matrix, slope, constant = gram[:-1, :-1], gram[:-1, -1], gram[-1, -1]
        image = matrix @ d
        return BlockQuadratic(
            matrix.unsqueeze(0),
            (slope - image).unsqueeze(0),
            (constant - 2 * slope @ d + image @ d).reshape(1),
        )

    def _rows(
        self, merged: Parameters, batch: Batch, target: Tensor, step: Callable[[], None]
    ) -> Tensor:
        """The derivatives by every coefficient, then outputs minus target, shape [G · K + 1, T · n]."""
        rows = target.new_zeros(self.shape[0] * self.shape[1] + 1, target.numel())
        rows[-1] = (self._outputs(merged, batch) - target).view(-1)
        number = 0

        def outputs(part: Parameters) -> Tensor:
            return self._outputs({**merged, **part}, batch)

        for group in self._groups:
            here = {name: merged[name] for name in group}
            for expert in self._experts:
                if self.moving[number]:
                    along = {name: expert[name] - self._base[name] for name in group}
                    pushed = torch.func.jvp(outputs, (here,), (along,))
                    rows[number] = pushed[1].reshape(-1)
                number += 1
                step()
        return rows
