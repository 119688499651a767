"""Random linear layers with experts and calibration inputs, and their objective from outputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from isthmus.projection.directions import Directions, OutputDirections
from isthmus.projection.objective import LayerObjective, expert_objective
from isthmus.projection.statistics import InputMoments
from isthmus.projection.task_vector_bases import ColumnGroups, Elementwise, RowGroups


@dataclass
class Layer:
    base: torch.Tensor
    tau: torch.Tensor
    inputs: list[torch.Tensor]

    @property
    def moments(self):
        found = []
        for x in self.inputs:
            found.append(InputMoments.empty(x.shape[1]))
            found[-1].add(x)
        return found

    @property
    def objective(self) -> LayerObjective:
        return expert_objective(self.tau, self.moments)

    def error(self, correction) -> float:
        """Σ ‖(W_0 + Δ)x − (W_0 + τ_t)x‖² from the outputs themselves."""
        total = 0.0
        for target, x in zip(self.tau, self.inputs, strict=True):
            merged = x @ (self.base + correction).mT
            total += float((merged - x @ (self.base + target).mT).square().sum())
        return total


def layer(seed=0, experts=3, m=6, n=5, examples=20) -> Layer:
    """Inputs of every task have another covariance, far from white."""
    random = np.random.default_rng(seed)

    def normal(*shape):
        return torch.from_numpy(random.normal(size=shape))

    scales = torch.logspace(0, -2, n, dtype=torch.float64)
    inputs = [normal(examples, n) * scales @ normal(n, n) for _ in range(experts)]
    return Layer(normal(m, n), normal(experts, m, n), inputs)


def bases(one: Layer):
    """Every kind of basis of a layer."""
    m, n = one.base.shape
    return {
        "scalar": RowGroups.scalar(one.tau),
        "row groups": RowGroups(one.tau, torch.arange(m) // 2),
        "rows": RowGroups.diagonal(one.tau),
        "column groups": ColumnGroups(one.tau, torch.arange(n) % 2),
        "columns": ColumnGroups.diagonal(one.tau),
        "elementwise": Elementwise(one.tau),
        "directions": Directions(torch.cat([one.tau, one.base.unsqueeze(0)])),
        "output directions": OutputDirections(torch.linalg.qr(one.base[:, :2]).Q, n),
    }


BASES = sorted(bases(layer()))
