"""The Hessian of the loss at a model: its largest eigenvalue and its trace, by products with vectors alone."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from isthmus.errors import PathError
from isthmus.paths.mixing import Parameters, wide

Batch = TypeVar("Batch")

_TOLERANCE = 1e-3
_PROBES = 16
_LANCZOS = 20
_RESTARTS = 30


class CurvatureWarning(UserWarning):
    """An eigenvalue was not found to its tolerance."""


@dataclass(frozen=True)
class Curvature:
    """The Hessian H of the mean loss at a model.

    Attributes:
        top: Its largest eigenvalue λ, the sharpness.
        residual: ‖Hv − λv‖ / |λ| for a unit vector v: some eigenvalue lies so near, relative to λ.
        converged: The residual is within the tolerance.
        trace: Estimated.
        trace_error: Its standard error; 0 where the trace is exact.
        dimension: How many numbers the loss was differentiated by.
        products: How many products with H all this took.
    """

    top: float
    residual: float
    converged: bool
    trace: float
    trace_error: float
    dimension: int
    products: int


def curvature(
    summed_loss: Callable[[Parameters, Batch], tuple[Tensor, float]],
    parameters: Parameters,
    batches: Sequence[Batch],
    *,
    names: Collection[str] | None = None,
    generator: torch.Generator,
    tolerance: float = _TOLERANCE,
    probes: int = _PROBES,
) -> Curvature:
    """Largest eigenvalue by Lanczos (ARPACK), trace by Hutch++ (Meyer et al. 2021, arXiv 2010.09649).

    H is that of the mean over the whole data set, however it is cut into batches. About three times as
    many vectors of the size of the parameters as there are probes are in memory, in float64.

    Args:
        summed_loss: (parameters, batch) → the sum of the losses of a batch's examples, and their number.
        parameters: The model. In float64 the products have 15 digits, in float32 about 6.
        batches: The data.
        names: By which tensors to differentiate; every floating-point one if None. Leave out the running
            statistics of BatchNorm.
        generator: For the probes and the start; on the CPU.
        tolerance: For the residual.
        probes: Random vectors for the trace, as many again for the sketch of H.

    Warns:
        CurvatureWarning: The eigenvalue did not converge; `converged` says so too.

    Raises:
        PathError: No data, no tensors, fewer than two probes, or a Hessian that is not finite.
    """
    if not batches:
        raise PathError("There is no data to take the curvature on", "Give one batch at least.")
    if probes < 2:
        raise PathError(f"{probes} probes have no standard error", "Take two or more.")
    hessian = _Hessian(summed_loss, parameters, batches, names)
    n = hessian.size
    if n <= _LANCZOS:
        matrix = np.stack([hessian(row) for row in np.eye(n)])
        top = float(np.linalg.eigvalsh((matrix + matrix.T) / 2)[-1])
        return Curvature(top, 0.0, True, float(np.trace(matrix)), 0.0, n, hessian.products)
    top, residual = _top(hessian, generator, tolerance)
    converged = residual <= tolerance
    if not converged:
        warnings.warn(
            f"The largest eigenvalue {top:.4g} has the residual {residual:.2g}, above {tolerance:.2g}: "
            "in float64, or with a larger tolerance, it converges",
            CurvatureWarning,
            stacklevel=2,
        )
    trace, error = _trace(hessian, generator, probes)
    return Curvature(top, residual, converged, trace, error, n, hessian.products)


Vector = NDArray[np.float64]


class _Hessian:
    """v → Hv, shape [n], the gradient of ⟨∇L, v⟩, batch by batch."""

    def __init__(
        self,
        summed_loss: Callable[[Parameters, Any], tuple[Tensor, float]],
        parameters: Parameters,
        batches: Sequence[Any],
        names: Collection[str] | None,
    ) -> None:
        self._loss = summed_loss
        self._batches = batches
        self.parameters = {name: parameters[name].detach() for name in parameters}
        if names is not None and (unknown := sorted(set(names) - self.parameters.keys())):
            raise PathError(
                f"The model has no tensor {unknown[0]!r}",
                f"It has, among others, {next(iter(self.parameters))!r}.",
            )
        self._leaves: list[Tensor] = []
        for name, tensor in self.parameters.items():
            if tensor.is_floating_point() and (names is None or name in names):
                self.parameters[name] = wide(tensor).clone().requires_grad_()
                self._leaves.append(self.parameters[name])
        if not self._leaves:
            raise PathError("There is no tensor to differentiate by", "Name floating-point ones.")
        self._sizes = [leaf.numel() for leaf in self._leaves]
        self.size = sum(self._sizes)
        self.products = 0

    def __call__(self, vector: Vector) -> Vector:
        whole = torch.from_numpy(np.ascontiguousarray(vector, np.float64).reshape(-1))
        parts = torch.split(whole, self._sizes)
        v = [part.to(leaf).view_as(leaf) for part, leaf in zip(parts, self._leaves, strict=True)]
        total = np.zeros(self.size)
        count = 0.0
        for batch in self._batches:
            image, examples = self._product(batch, v)
            total += image
            count += examples
        self.products += 1
        if count == 0:
            raise PathError("The batches hold no examples", "Give data with labels.")
        if not np.isfinite(total).all():
            raise PathError(
                "The Hessian of the loss is not finite",
                "See that the model and the data are, and that the loss has second derivatives.",
            )
        return total / count

    def _product(self, batch: Any, v: list[Tensor]) -> tuple[Vector, float]:
        # Fused attention has no second derivative.
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            loss, examples = self._loss(self.parameters, batch)
            if not loss.requires_grad:
                raise PathError(
                    "The loss does not depend on the parameters",
                    "Compute it from the parameters given, with gradients on.",
                )
            gradients = torch.autograd.grad(
                loss, self._leaves, create_graph=True, materialize_grads=True
            )
            slope = sum(
                ((g * part).sum() for g, part in zip(gradients, v, strict=True)),
                start=loss.new_zeros(()),
            )
            if not slope.requires_grad:
                return np.zeros(self.size), examples
            images = torch.autograd.grad(slope, self._leaves, materialize_grads=True)
        return torch.cat([image.double().flatten() for image in images]).cpu().numpy(), examples


def _top(hessian: _Hessian, generator: torch.Generator, tolerance: float) -> tuple[float, float]:
    """The largest eigenvalue, and the residual."""
    start = torch.randn(hessian.size, generator=generator, dtype=torch.float64).numpy()
    if not hessian(start).any():
        return 0.0, 0.0  # ARPACK takes no start that H makes 0
    operator = LinearOperator((hessian.size, hessian.size), matvec=hessian, dtype=np.float64)
    settings = {"k": 1, "which": "LA", "ncv": _LANCZOS, "v0": start}
    try:
        values, vectors = eigsh(operator, tol=tolerance / 2, maxiter=_RESTARTS, **settings)
    except ArpackNoConvergence:
        # So wide a tolerance takes whatever one round finds; the residual then says what it is worth.
        values, vectors = eigsh(operator, tol=1.0, **settings)
    value, vector = float(values[0]), vectors[:, 0]
    size = float(np.linalg.norm(hessian(vector) - value * vector))
    return value, size / abs(value) if value else math.inf


def _trace(hessian: _Hessian, generator: torch.Generator, probes: int) -> tuple[float, float]:
    """Exact on the range of a sketch of H, by random signs on the rest; and the standard error."""
    n = hessian.size
    count = min(probes, n // 2)
    basis = np.linalg.qr(np.stack([hessian(signs) for signs in _signs(count, n, generator)], 1))[0]
    exact = sum(float(column @ hessian(column)) for column in basis.T)
    rest = []
    for signs in _signs(probes, n, generator):
        off = signs - basis @ (basis.T @ signs)
        rest.append(float(off @ hessian(off)))
    return exact + float(np.mean(rest)), float(np.std(rest, ddof=1) / math.sqrt(probes))


def _signs(count: int, n: int, generator: torch.Generator) -> Iterator[Vector]:
    """Vectors of fair signs, shape [n] each."""
    for _ in range(count):
        drawn = 2 * torch.randint(2, (n,), generator=generator, dtype=torch.float64) - 1
        yield drawn.numpy()
