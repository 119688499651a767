"""Fisher merging: the mean under a quadratic surrogate of the Fisher-Rao metric.

The Fréchet mean of models under the Fisher-Rao distance of their predictions has no formula. Replacing
the squared distance to θ_k by its second-order form (θ − θ_k)ᵀF_k(θ − θ_k), with the Fisher information
F_k at θ_k, gives one: θ = (Σ w_k F_k)⁻¹ Σ w_k F_k θ_k (Matena and Raffel 2022, Merging models with
Fisher-weighted averaging, arXiv 2111.09832). The metric is frozen at the models, so this is
a surrogate: it sees sensitivity, not symmetry.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isthmus.errors import MethodError
from isthmus.geometry.checks import as_float64
from isthmus.geometry.frechet import normalized
from isthmus.geometry.linalg import sym


def diagonal_fisher_mean(
    parameters: Sequence[Tensor],
    fishers: Sequence[Tensor],
    weights: Sequence[float] | Tensor | None = None,
) -> Tensor:
    """Σ w_k F_k θ_k / Σ w_k F_k, entry by entry.

    Where every F_k is zero no model minds, and the entry is the weighted mean: the limit of F_k + ε.

    Args:
        parameters: K tensors θ_k of one shape.
        fishers: K tensors of the same shape, the diagonals of the Fisher information, non-negative.
        weights: Shape [K], non-negative. Equal if None.

    Returns:
        float64, of the shape of one θ_k.

    Raises:
        MethodError: Different numbers or shapes, NaN, negative Fisher information, bad weights.
    """
    share = normalized(weights, len(parameters))
    _paired(len(parameters), len(fishers))
    shape = tuple(parameters[0].shape)
    theta = torch.stack([_whole(x, shape, "parameters") for x in parameters])
    fisher = torch.stack([_whole(x, shape, "diagonal Fisher information") for x in fishers])
    if (fisher < 0).any():
        raise MethodError(
            "Fisher mean: negative diagonal Fisher information",
            "give means of squared gradients",
        )
    # The largest is divided out first, or tiny squares of gradients would underflow.
    largest = fisher.amax(dim=0)
    relative = fisher / torch.where(largest > 0, largest, 1.0)
    scaled = share.reshape(-1, *(1 for _ in shape)) * torch.where(largest > 0, relative, 1.0)
    total = scaled.sum(dim=0)
    # A model of weight 0 may be the only one with information; then the weighted mean decides.
    plain = torch.tensordot(share, theta, dims=1)
    mean = (scaled * theta).sum(dim=0) / torch.where(total > 0, total, 1.0)
    merged: Tensor = torch.where(total > 0, mean, plain)
    return merged


def kronecker_fisher_mean(
    parameters: Sequence[Tensor],
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[float] | Tensor | None = None,
    *,
    damping: float = 1e-3,
    tolerance: float = 1e-10,
) -> Tensor:
    """The W with Σ w_k (G_k W A_k + δ_k W) = Σ w_k (G_k W_k A_k + δ_k W_k), for layers y = Wx.

    The Fisher information of a layer is about G ⊗ A, with G = E[gradient of y, squared] and
    A = E[xxᵀ] (Martens and Grosse 2015, Optimizing neural networks with Kronecker-factored
    approximate curvature, arXiv 1503.05671, section 3). A sum of such products has no closed inverse:
    conjugate gradients solve it, preconditioned by the product of the mean factors.

    Args:
        parameters: K matrices W_k, shape [m, n].
        outputs: K matrices G_k, shape [m, m], positive semidefinite.
        inputs: K matrices A_k, shape [n, n], positive semidefinite.
        weights: Shape [K], non-negative. Equal if None.
        damping: δ_k as a share of the mean eigenvalue of G_k ⊗ A_k, positive; it decides where no
            model has information.
        tolerance: Largest residual relative to the right-hand side.

    Returns:
        float64, shape [m, n].

    Raises:
        MethodError: Different numbers or shapes, NaN, indefinite factors, bad weights or damping, or
            conjugate gradients that do not converge.
    """
    share = normalized(weights, len(parameters))
    _paired(len(parameters), len(outputs))
    _paired(len(parameters), len(inputs))
    if not damping > 0:
        raise MethodError(
            f"Fisher mean: damping {damping}", "give a positive damping, such as 1e-3"
        )
    m, n = parameters[0].shape
    theta = torch.stack([_whole(x, (m, n), "parameters") for x in parameters])
    g = torch.stack([_factor(x, m, "output factor") for x in outputs])
    a = torch.stack([_factor(x, n, "input factor") for x in inputs])
    mean_eigenvalue = torch.diagonal(g, dim1=1, dim2=2).mean(1) * torch.diagonal(
        a, dim1=1, dim2=2
    ).mean(1)
    start: Tensor = torch.tensordot(share, theta, dims=1)
    if not mean_eigenvalue.any():
        return start
    floor = damping * mean_eigenvalue

    def information(w: Tensor) -> Tensor:
        image: Tensor = torch.einsum("k,kmn->mn", share, g @ w @ a) + (share @ floor) * w
        return image

    g_values, g_vectors = torch.linalg.eigh(torch.tensordot(share, g, dims=1))
    a_values, a_vectors = torch.linalg.eigh(torch.tensordot(share, a, dims=1))
    spectrum = torch.outer(g_values.clamp(min=0), a_values.clamp(min=0)) + share @ floor

    def precondition(w: Tensor) -> Tensor:
        image: Tensor = g_vectors @ ((g_vectors.mT @ w @ a_vectors) / spectrum) @ a_vectors.mT
        return image

    right_side = torch.einsum("k,kmn->mn", share, g @ theta @ a + floor.reshape(-1, 1, 1) * theta)
    w = start
    residual = right_side - information(w)
    z = precondition(residual)
    direction, energy = z, (residual * z).sum()
    allowed = tolerance * torch.linalg.matrix_norm(right_side)
    for _ in range(10 * m * n + 100):
        if torch.linalg.matrix_norm(residual) <= allowed:
            return w
        image = information(direction)
        length = energy / (direction * image).sum()
        w, residual = w + length * direction, residual - length * image
        z = precondition(residual)
        previous, energy = energy, (residual * z).sum()
        direction = z + energy / previous * direction
    raise MethodError(
        f"Fisher mean: conjugate gradients did not reach a residual of {tolerance:.0e}",
        "raise the damping",
    )


def _whole(x: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """The tensor in float64, of exactly this shape."""
    if isinstance(x, Tensor) and x.ndim != len(shape):
        raise MethodError(
            f"{name}: shape {list(x.shape)}, expected {list(shape)}",
            "merge tensors of one architecture",
        )
    return as_float64(x, shape, name)


def _factor(x: Tensor, size: int, name: str) -> Tensor:
    """A positive semidefinite Kronecker factor."""
    factor = sym(_whole(x, (size, size), name))
    values = torch.linalg.eigvalsh(factor)
    if values[0] < -1e-6 * values[-1].abs():
        raise MethodError(f"{name}: not positive semidefinite", "give a mean of outer products")
    return factor


def _paired(parameters: int, fishers: int) -> None:
    if parameters != fishers:
        raise MethodError(
            f"Fisher mean: {parameters} models and {fishers} Fisher matrices",
            "give one for each model",
        )
