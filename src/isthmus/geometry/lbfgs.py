"""Descent directions from the last few steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from torch import Tensor

_CURVED = 1e-10


class Memory:
    """Limited-memory BFGS (Nocedal and Wright 2006, Numerical optimization, algorithm 7.4).

    scipy's and torch's own take no approximation of the inverse Hessian to begin with, and move
    along straight lines.

    Args:
        size: How many steps are remembered.
    """

    def __init__(self, size: int) -> None:
        self._pairs: deque[tuple[Tensor, Tensor, float]] = deque(maxlen=size)

    def __bool__(self) -> bool:
        return bool(self._pairs)

    def learn(self, step: Tensor, change: Tensor) -> None:
        """Remember a step and the change of the gradient along it, if it shows positive curvature."""
        curvature = float(step @ change)
        if curvature > _CURVED * float(step.norm() * change.norm()):
            self._pairs.append((step, change, curvature))

    def forget(self) -> None:
        """Start anew."""
        self._pairs.clear()

    def direction(self, gradient: Tensor, inverse: Callable[[Tensor], Tensor]) -> Tensor:
        """The quasi-Newton step.

        Args:
            gradient: Shape [n].
            inverse: An approximation of the inverse Hessian, applied to a vector; it is scaled to
                the curvature of the last step.
        """
        rest, factors = gradient.clone(), []
        for step, change, curvature in reversed(self._pairs):
            factors.append(float(step @ rest) / curvature)
            rest.sub_(change, alpha=factors[-1])
        image = inverse(rest)
        if self._pairs:
            _, change, curvature = self._pairs[-1]
            image *= curvature / float(change @ inverse(change))
        for (step, change, curvature), factor in zip(self._pairs, reversed(factors), strict=True):
            image.add_(step, alpha=factor - float(change @ image) / curvature)
        return -image
