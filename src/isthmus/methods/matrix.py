"""Methods that decompose a whole matrix: what they share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from array_api_compat import is_numpy_array

from isthmus.errors import MethodError
from isthmus.methods.deltas import DeltaChunk, Deltas
from isthmus.methods.method import Chunk, Combine, Method, Settings, TensorStream
from isthmus.methods.weighted import numbers, weighted_sum
from isthmus.typing import Array

if TYPE_CHECKING:
    from torch import Tensor

GAUGE = (
    "The merged adapter does not depend on the factorisation: the core holds the updates up to "
    "rotations, which the rule turns along, so that the result is that on the full updates."
)
"""The gauge of all of them."""


@dataclass(frozen=True, kw_only=True)
class MatrixMethod(Method):
    """A rule for the task vectors of a matrix, which turns along with rotations of its sides.

    Tensors that are no matrices are merged to (1/K) sum_k w_k τ_k, the average at weight 1, as the
    code of TSV and of Iso does. Everything is in float64, and all experts' task vectors are held at
    once. What is called zero is zero up to rounding: `isthmus.geometry.factored.NEGLIGIBLE`.
    """

    @abstractmethod
    def merge_matrices(self, deltas: Tensor, settings: Settings) -> Tensor:
        """Merge.

        Args:
            deltas: Task vectors times their weights, shape [K, m, n], none of them zero.
            settings: The other parameters.

        Returns:
            Shape [m, n].
        """

    def prepare(self, tensor: TensorStream, settings: Settings) -> Combine:
        """Merge the whole matrix, and return what cuts it in chunks.

        Raises:
            MethodError: if the matrix holds NaN or infinity, which has no decomposition.
        """
        weights = numbers(settings, "weight")
        factor = float(cast("float", settings.shared["lambda"]))
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            return _average(weights, factor)
        deltas = _whole(Deltas(tensor), tensor.shape, weights)
        if not bool(deltas.isfinite().all()):
            raise MethodError(
                f"{self.name} decomposes matrices, and one holds NaN or infinity",
                "Leave the broken model out, or take an elementwise method.",
            )
        deltas = deltas[deltas.flatten(1).any(dim=1)]
        shape = tensor.shape
        merged = (
            factor * self.merge_matrices(deltas, settings)
            if len(deltas)
            else deltas.new_zeros(shape)
        ).reshape(-1)

        def combine(chunk: Chunk) -> Array:
            base = cast("Array", chunk.base)
            piece: Any = merged[chunk.start : chunk.start + base.shape[0]]
            base += piece.numpy() if is_numpy_array(base) else piece
            return base

        return combine


def _average(weights: Sequence[float], factor: float) -> Combine:
    def combine(chunk: Chunk) -> Array:
        base = cast("Array", chunk.base)
        experts = chunk.experts
        experts -= base
        merged = weighted_sum(experts, weights)
        merged *= factor / len(weights)
        merged += base
        return merged

    return combine


def _whole(deltas: Deltas, shape: tuple[int, ...], weights: Sequence[float]) -> Tensor:
    """All task vectors times their weights, shape [K, m, n], where the chunks are."""
    import torch

    def rows(chunk: DeltaChunk) -> Tensor:
        return torch.as_tensor(chunk.rows)

    whole: Tensor | None = None
    for chunk in deltas:
        piece = rows(chunk)
        if whole is None:
            size = (len(weights), deltas.size)
            whole = torch.empty(size, dtype=torch.float64, device=piece.device)
        whole[:, chunk.start : chunk.start + piece.shape[1]] = piece
    assert whole is not None
    whole *= whole.new_tensor(weights).unsqueeze(1)
    return whole.reshape(-1, *shape)


def shared_rank(deltas: Tensor, ranks: Sequence[int]) -> int:
    """The lesser of the dimensions of all column spaces together and of all row spaces.

    It is what min(m, n) is to matrices of full rank, for whose rank the papers take it.

    Args:
        deltas: Shape [K, m, n].
        ranks: The rank of each.
    """
    import torch

    from isthmus.geometry.factored import numerical_rank

    _, m, n = deltas.shape
    if max(ranks) == min(m, n):
        return min(m, n)
    side = deltas.permute(1, 0, 2).reshape(m, -1)
    return min(
        numerical_rank(torch.linalg.svdvals(side)),
        numerical_rank(torch.linalg.svdvals(deltas.reshape(-1, n))),
    )


def orthogonalized(columns: Tensor) -> Tensor:
    """The matrix with orthonormal columns that is nearest: PQᵀ of the SVD PDQᵀ.

    Where columns depend on each other it is not unique. Then this is the partial isometry on what
    they span, the limit in which directions of D = 0 count for nothing.

    Args:
        columns: Shape [m, c].
    """
    import torch

    from isthmus.geometry.factored import numerical_rank

    left, values, right = torch.linalg.svd(columns, full_matrices=False)
    rank = numerical_rank(values)
    nearest: Tensor = left[:, :rank] @ right[:rank]
    return nearest
