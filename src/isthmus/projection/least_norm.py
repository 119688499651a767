"""Unconstrained minimisers: Cholesky where the blocks are regular, least norm where they are not."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.projection.conjugate import conjugate_gradients
from isthmus.projection.constraints import FREE
from isthmus.projection.quadratic import BlockQuadratic, Quadratic
from isthmus.projection.solution import Solution, solution

SINGULAR = 1e-12
"""A pivot or eigenvalue of a matrix with unit diagonal below this is rounding."""

FORMED = 64
"""Up to so many unknowns a quadratic that is given as a product is formed."""


def least_norm(quadratic: Quadratic, *, ridge: float = 0.0) -> Solution:
    """The d of least norm that minimises J(d) + ρ‖d‖².

    Args:
        quadratic: J. Blocks of matrices are solved directly, products of more than 64 unknowns by
            conjugate gradients, which start at 0 and so also end at the least norm.
        ridge: ρ as a share of the mean diagonal entry of A over all blocks.

    Raises:
        MethodError: A negative ridge.
    """
    if not 0 <= ridge < float("inf"):
        raise MethodError(f"a ridge of {ridge}", "give 0 or a positive share such as 1e-6")
    if isinstance(quadratic, BlockQuadratic) or quadratic.shape[1] <= FORMED:
        return _direct(quadratic.formed(), ridge)
    penalised = WithRidge.of(quadratic, ridge) if ridge else quadratic
    d, steps = conjugate_gradients(penalised)
    return solution(quadratic, d, FREE, iterations=steps, solved=penalised)


class WithRidge(Quadratic):
    """J(d) + ρ‖d‖²."""

    def __init__(self, quadratic: Quadratic, strength: float) -> None:
        self.quadratic, self.strength = quadratic, strength
        self.linear, self.constant = quadratic.linear, quadratic.constant

    @classmethod
    def of(cls, quadratic: Quadratic, ridge: float) -> WithRidge:
        """With ρ as a share of the mean diagonal entry.

        Raises:
            MethodError: The diagonal is not known.
        """
        diagonal = quadratic.diagonal()
        if diagonal is None:
            raise MethodError(
                "a ridge on a quadratic whose diagonal is not known",
                "form it first, or add the ridge to its product",
            )
        return cls(quadratic, ridge * float(diagonal.mean()))

    def product(self, d: Tensor) -> Tensor:
        """(A + ρ) d."""
        return self.quadratic.product(d) + self.strength * d

    def diagonal(self) -> Tensor | None:
        """The diagonal of A + ρ."""
        diagonal = self.quadratic.diagonal()
        return None if diagonal is None else diagonal + self.strength


def ridged(quadratic: BlockQuadratic, ridge: float) -> BlockQuadratic:
    """J(d) + ρ‖d‖² with matrices, ρ as a share of the mean diagonal entry."""
    if not ridge:
        return quadratic
    matrix = quadratic.matrix
    strength = ridge * torch.diagonal(matrix, dim1=1, dim2=2).mean()
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return BlockQuadratic(matrix + strength * identity, quadratic.linear, quadratic.constant)


def unit_scale(matrix: Tensor) -> Tensor:
    """Scales s with diag(s) A diag(s) of unit diagonal, shape [N, n]; 1 where the diagonal is zero."""
    diagonal = torch.diagonal(matrix, dim1=1, dim2=2)
    scale: Tensor = torch.where(diagonal > 0, diagonal, 1.0).rsqrt()
    return scale


def factorised(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cholesky factors of the matrices at unit diagonal, their scale, and which are singular.

    Scaling first makes the answer independent of how large an expert's task vector is.

    Args:
        matrix: Shape [N, n, n].

    Returns:
        Shapes [N, n, n], [N, n] and [N].
    """
    scale = unit_scale(matrix)
    unit = matrix * scale.unsqueeze(-1) * scale.unsqueeze(-2)
    factor, failed = torch.linalg.cholesky_ex(unit)
    pivots = torch.diagonal(factor, dim1=1, dim2=2).square()
    singular = (failed != 0) | ~(pivots > SINGULAR).all(dim=1)
    return factor, scale, singular


def null_space(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eigenvalues, eigenvectors at unit diagonal, and which eigenvalues vanish.

    Returns:
        Shapes [N, n], [N, n, n] and [N, n].
    """
    scale = unit_scale(matrix)
    values, vectors = torch.linalg.eigh(matrix * scale.unsqueeze(-1) * scale.unsqueeze(-2))
    n = matrix.shape[-1]
    return values, vectors, values <= SINGULAR * n * values[:, -1:].clamp(min=1.0)


def _direct(quadratic: BlockQuadratic, ridge: float) -> Solution:
    penalised = ridged(quadratic, ridge)
    matrix, linear = penalised.matrix, penalised.linear
    blocks, n = linear.shape
    # Blocks that share a matrix are its many right sides.
    right = linear.mT.unsqueeze(0) if len(matrix) == 1 else linear.unsqueeze(-1)
    d = torch.zeros_like(right)
    undetermined = torch.zeros(len(matrix), n, dtype=torch.bool, device=matrix.device)
    factor, scale, singular = factorised(matrix)
    regular = ~singular
    if regular.any():
        s = scale[regular].unsqueeze(-1)
        d[regular] = -s * torch.cholesky_solve(s * right[regular], factor[regular])
    if singular.any():
        d[singular], undetermined[singular] = _singular(matrix[singular], right[singular])
    whole = d[0].mT if len(matrix) == 1 else d.squeeze(-1)
    return solution(
        quadratic,
        whole.reshape(blocks, n),
        FREE,
        solved=penalised,
        undetermined=undetermined.expand(blocks, n),
    )


def _singular(matrix: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """The least-norm solutions of A d = −right, and which unknowns a null direction moves."""
    values, vectors, vanish = null_space(matrix)
    scale = unit_scale(matrix).unsqueeze(-1)
    inverse = torch.where(vanish, 0.0, 1 / torch.where(vanish, 1.0, values)).unsqueeze(-1)
    d = -scale * (vectors @ (inverse * (vectors.mT @ (scale * right))))
    undetermined = torch.zeros(len(matrix), matrix.shape[-1], dtype=torch.bool, device=d.device)
    nullities = vanish.sum(dim=1)
    # The null space of A is the scaled one of the matrix at unit diagonal: at right angles to it d is
    # shortest. Eigenvalues ascend, so the null directions come first.
    for nullity in sorted(set(nullities.tolist())):
        if not nullity:
            continue
        those = nullities == nullity
        basis = torch.linalg.qr(scale[those] * vectors[those][:, :, :nullity]).Q
        d[those] -= basis @ (basis.mT @ d[those])
        undetermined[those] = basis.square().sum(dim=2) > 1e-12
    return d, undetermined
