"""The smallest ball that holds a network, once each neuron is balanced between its layers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize

from isthmus.errors import TwoLayerError
from isthmus.two_layer.network import BALLS, Ball, Floats, Network


@dataclass(frozen=True, eq=False)
class Radius:
    """The smallest radius over (aᵢ, wᵢ) → (aᵢcᵢ, wᵢ/cᵢ), cᵢ > 0.

    Attributes:
        ball: Of which norm.
        value: R, attained by `network`.
        lower: What no rescaling falls below; equal to `value` in closed form, a dual bound for the operator
            norm.
        network: The balanced network.
    """

    ball: Ball
    value: float
    lower: float
    network: Network


def minimal_radius(network: Network, ball: Ball, tolerance: float = 1e-6) -> Radius:
    """Balance every neuron between its layers so that the network fits into the smallest ball.

    With uᵢ = |aᵢ|wᵢ and pᵢ the balanced aᵢ²:

    - `max`: R² = maxᵢ ‖uᵢ‖_∞, since max(c, ‖u‖_∞/c) ≥ √‖u‖_∞;
    - `frobenius`: R² = Σ‖uᵢ‖, by Cauchy–Schwarz on ‖a‖·‖W‖_F; `joint`: R² = 2Σ‖uᵢ‖;
    - `operator`: R² = min over p of (Σpᵢ·λ_max(Σuᵢuᵢᵀ/pᵢ))^½ = max over M ⪰ 0, tr M = 1, of
      Σᵢ√(uᵢᵀMuᵢ): convex in p, concave in M, solved by L-BFGS in M = BBᵀ/‖B‖²; p ∝ √(uᵢᵀMuᵢ). Value and
      lower bound come from a p and an M of their own, so that both hold whatever the solver did.

    Neurons of uᵢ = 0 become 0.

    Args:
        network: Any.
        ball: See `norm`.
        tolerance: A wider relative gap between value and lower bound is warned of.

    Raises:
        TwoLayerError: an unknown ball.
    """
    if ball not in BALLS:
        raise TwoLayerError(f"ball is {ball}", f"it must be one of {', '.join(BALLS)}")
    products = network.products
    lengths = np.linalg.norm(products, axis=1)
    if not lengths.any():
        return Radius(ball, 0.0, 0.0, Network(0 * network.outer, 0 * network.inner))
    if ball == "max":
        squares = np.abs(products).max(axis=1)
        value = float(np.sqrt(squares.max()))
        return Radius(ball, value, value, _balanced(network, squares))
    if ball in ("frobenius", "joint"):
        value = float(np.sqrt(lengths.sum() * (2 if ball == "joint" else 1)))
        return Radius(ball, value, value, _balanced(network, lengths))
    squares, upper, lower = _operator(products)
    if upper > lower * (1 + tolerance):
        warnings.warn(
            f"the operator radius is only known to lie between {lower} and {upper}", stacklevel=2
        )
    return Radius(ball, upper, lower, _balanced(network, squares))


def _balanced(network: Network, squares: Floats) -> Network:
    """The same uᵢ with |aᵢ| = √squares."""
    sizes = np.sqrt(squares)
    inverse = np.divide(1, sizes, out=np.zeros_like(sizes), where=sizes > 0)
    return Network(np.sign(network.outer) * sizes, network.products * inverse[:, None])


def _operator(products: Floats) -> tuple[Floats, float, float]:
    """The aᵢ² of the balanced network, its radius, and the dual bound of the radius."""
    live = np.linalg.norm(products, axis=1) > 0
    # In the span of the rows, where the optimal M lives.
    _, values, right = np.linalg.svd(products[live], full_matrices=False)
    rows = products[live] @ right[values > 1e-12 * values[0]].T
    rank = rows.shape[1]
    scale = np.linalg.norm(rows)
    rows = rows / scale
    smooth = 1e-24

    def against(flat: Floats) -> tuple[float, Floats]:
        b = flat.reshape(rank, rank)
        size = np.linalg.norm(b)
        mapped = rows @ b
        roots = np.sqrt(np.square(mapped).sum(axis=1) + smooth * size**2)
        slope = rows.T @ (mapped / roots[:, None]) / size
        total = float(roots.sum() / size)
        extra = (smooth * (1 / roots).sum() * size - total) / size**2
        return -total, -(slope + extra * b).ravel()

    solved = minimize(
        against,
        np.eye(rank).ravel(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 5000, "maxfun": 20000, "ftol": 1e-16, "gtol": 1e-10, "maxcor": 30},
    )
    b = solved.x.reshape(rank, rank) / np.linalg.norm(solved.x)
    roots = np.linalg.norm(rows @ b, axis=1)
    shares = np.maximum(roots / roots.sum(), 1e-15)
    shares = shares / shares.sum()
    top = float(np.linalg.norm(rows / np.sqrt(shares)[:, None], 2)) ** 2
    # Σp = λ_max(UᵀP⁻¹U) = R² where p = R²·shares.
    square = scale * float(np.sqrt(top))
    squares = np.zeros(len(products))
    squares[live] = square * shares
    return squares, float(np.sqrt(square)), float(np.sqrt(scale * roots.sum()))
