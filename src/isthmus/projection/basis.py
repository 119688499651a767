"""What a basis is: the corrections Δ(d) among which a projection chooses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.projection.heuristics import Heuristic
from isthmus.projection.least_norm import least_norm
from isthmus.projection.objective import LayerObjective
from isthmus.projection.quadratic import BlockQuadratic, Quadratic

IN_SPAN = 1e-7
"""A correction that is missed by no more than this share of its norm lies in the span."""


class Basis(ABC):
    """A linear map from coefficients d to corrections Δ(d) of one layer's weight.

    Coefficients have the shape [N, n] of `shape`: N blocks that do not interact in the layer-local
    objective, n unknowns in each. `correction` is differentiable in d, and may be traced by torch.func.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Blocks and unknowns of a block."""

    @property
    def dimension(self) -> int:
        """How many coefficients there are."""
        blocks, unknowns = self.shape
        return blocks * unknowns

    @property
    def mixes(self) -> bool:
        """Whether a block is one coefficient for each direction, so that a simplex makes a mixture."""
        return True

    @abstractmethod
    def correction(self, d: Tensor) -> Tensor:
        """Δ(d), shape [m, n], for d of `shape`."""

    @abstractmethod
    def adjoint(self, matrix: Tensor) -> Tensor:
        """The coefficients e with ⟨e, d⟩ = ⟨matrix, Δ(d)⟩ for every d; from [m, n] to `shape`."""

    @abstractmethod
    def constants(self, squares: Tensor) -> Tensor:
        """J(0) by block, shape [N], from J(0) by output row, shape [m]."""

    def curvature(self, diagonal: Tensor) -> Tensor | None:  # noqa: ARG002
        """The diagonal of A from that of C, shape [n], where it depends on nothing else."""
        return None

    def quadratic(self, objective: LayerObjective) -> Quadratic:
        """J(Δ(d)) as a function of d: normal equations, or their product where they are too large.

        Raises:
            MethodError: The objective is another layer's.
        """
        return SpanQuadratic.of(self, objective)

    def closed_form(self, objective: LayerObjective) -> Tensor | None:  # noqa: ARG002
        """The least-norm minimiser without constraints, shape [N, n], where a formula gives it."""
        return None

    def point(self, heuristic: Heuristic) -> Tensor:
        """The coefficients d with Δ(d) = the heuristic's correction, shape [N, n].

        Raises:
            MethodError: The correction is not in the span of this basis.
        """
        return self.nearest(heuristic.correction, heuristic.name)

    def fitted(self, delta: Tensor) -> Tensor:
        """The least-norm d that minimises ‖Δ(d) − delta‖, shape [N, n]."""
        # Projection with white inputs is least squares in the weights.
        identity = torch.eye(delta.shape[1], dtype=torch.float64, device=delta.device)
        white = LayerObjective(identity, -delta, delta.square().sum(dim=1))
        return least_norm(self.quadratic(white)).coefficients

    def nearest(self, correction: Tensor, name: str = "this correction") -> Tensor:
        """The least-norm d with Δ(d) = correction, shape [N, n].

        Raises:
            MethodError: There is none.
        """
        delta = correction.to(torch.float64)
        d = self.fitted(delta)
        missed = float(torch.linalg.matrix_norm(self.correction(d) - delta))
        size = float(torch.linalg.matrix_norm(delta))
        if missed > IN_SPAN * size:
            raise MethodError(
                f"{name} is not in the span of the basis {type(self).__name__} (it misses "
                f"{missed / size:.1%} of the correction)",
                "compare it in a larger basis, such as Elementwise",
            )
        return d

    def unsettled(self, undetermined: Tensor) -> str | None:
        """What calibration leaves undetermined, in words; None where nothing need be said.

        Args:
            undetermined: Which coefficients, shape [N, n].
        """
        count = int(undetermined.sum())
        if not count:
            return None
        return f"{count} of {self.dimension} coefficients"


@dataclass(frozen=True, eq=False)
class SpanQuadratic(Quadratic):
    """J of a basis as a product: d → adjoint(Δ(d) C).

    Attributes:
        basis: The corrections.
        gram: C, shape [n, n].
        linear: b, shape [N, n].
        constant: c, shape [N].
    """

    basis: Basis
    gram: Tensor
    linear: Tensor
    constant: Tensor

    @classmethod
    def of(cls, basis: Basis, objective: LayerObjective) -> SpanQuadratic:
        """For one layer's objective."""
        return cls(
            basis,
            objective.gram,
            basis.adjoint(objective.cross),
            basis.constants(objective.squares),
        )

    def product(self, d: Tensor) -> Tensor:
        """A d."""
        return self.basis.adjoint(self.basis.correction(d) @ self.gram)

    def diagonal(self) -> Tensor | None:
        """The diagonal of A, where the basis knows it."""
        return self.basis.curvature(self.gram.diagonal())


def fitting(objective: LayerObjective, shape: tuple[int, int]) -> None:
    """Refuse the objective of a layer of another shape.

    Raises:
        MethodError: It is.
    """
    if objective.shape != shape:
        raise MethodError(
            f"a basis for weights {list(shape)} and an objective for weights "
            f"{list(objective.shape)}",
            "take task vectors and calibration of one layer",
        )


def one_block(matrix: Tensor, linear: Tensor, constant: Tensor) -> BlockQuadratic:
    """A quadratic whose unknowns all interact: A [n, n], b [n], c []."""
    return BlockQuadratic(
        ((matrix + matrix.mT) / 2).unsqueeze(0), linear.reshape(1, -1), constant.reshape(1)
    )
