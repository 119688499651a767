"""Merging the low-rank updates of adapters: coordinates in which a method for arrays can work.

An adapter changes a weight by ΔW = BA, and (BQ, Q⁻¹A) is the same change: a rule applied to the
factors depends on a choice that means nothing. So methods run on coordinates that depend on ΔW
alone, and their result is compressed to the asked rank.

| space | coordinates of ΔW_k | shape |
|---|---|---|
| core | UᵀΔW_k V in the joint column and row bases U, V | [R, R'] |
| knots | UᵀΔW_k = Σ V_kᵀ of the joint SVD [ΔW_1 ... ΔW_K] = U Σ Vᵀ | [R, n] |
| full | ΔW_k, formed from the factors in blocks of rows | [m, n] |

- core: Panariello et al. 2025, arXiv 2509.17786. They take the bases from the stacked factors; here
  they come from the updates (`isthmus.geometry.factored.joint`).
- knots: Stoica et al. 2024, arXiv 2410.19735. As in their code the singular values go with V_k
  before the merge, and U is joined after it. They trim over all layers at once; here a density
  holds for each tensor on its own, as in every method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import MethodError
from isthmus.geometry.factored import Factored, compressed, joint, left_basis, stacked
from isthmus.geometry.truncation import truncate
from isthmus.methods.method import Chunk, Method, Settings, TensorStream
from isthmus.methods.weighted import numbers

if TYPE_CHECKING:
    from torch import Tensor

SPACES = ("full", "core", "knots", "quotient")
"""Where adapters can be merged; `quotient` is the space of the methods that bring their own."""

CHUNK = 1 << 18
"""Elements of a full update that are formed at once, about."""


LARGEST = 480
"""log₂ of the largest update: squares of a model's matrix of such numbers sum to a finite one."""

SMALLEST = -240
"""log₂ of the updates below which they are scaled first: squares of what matters must not vanish."""


@dataclass(frozen=True, slots=True)
class LowRankMerge:
    """The merged update of one module.

    Attributes:
        update: Balanced factors, of exactly the asked rank.
        kept: Which share of the merge's squared norm has that rank; 1.0 if all of it.
        notes: What the user should know, such as a mean that did not converge.
    """

    update: Factored
    kept: float
    notes: tuple[str, ...] = ()


def merge_updates(
    method: Method,
    updates: Sequence[Factored],
    settings: Settings,
    *,
    space: str | None,
    rank: int,
) -> LowRankMerge:
    """Merge the adapters' updates of one module.

    Args:
        method: How.
        updates: One for each adapter, all of one shape; `Factored.zero` where an adapter leaves
            the module alone. On the processor, in any precision; the merge is in float64.
        settings: The method's parameters at this module.
        space: One of the method's spaces, or None for the first, its default.
        rank: Of the result, at least 1.

    Raises:
        MethodError: if the method cannot merge adapters or not in this space, the updates differ in
            shape, hold NaN or infinity or overflow, or the settings admit no merge.
    """
    from isthmus.geometry.linalg import one_thread

    space = _known_space(method, space)
    _check(updates, rank)
    exponent = max(update.exponent for update in updates)
    # On matrices this small more threads lose time, and would change the last bits.
    with one_thread():
        if exponent >= SMALLEST or exponent == -math.inf:
            return _merge(method, updates, settings, space, rank)
        # Every method commutes with a common factor, and a power of two rounds nothing.
        shift = min(-int(exponent) // 2, 1000)
        found = _merge(method, [_shifted(x, shift) for x in updates], settings, space, rank)
        return replace(found, update=_shifted(found.update, -shift))


def _merge(
    method: Method, updates: Sequence[Factored], settings: Settings, space: str, rank: int
) -> LowRankMerge:
    if method.adapters_only:
        return method.merge_low_rank(updates, settings, rank)
    coefficients = method.coefficients(settings)
    if coefficients is not None:
        return LowRankMerge(*stacked(updates, coefficients).recompressed(rank))
    updates = [update.double() for update in updates]
    return _MERGES[space](method, updates, settings, rank)


def add_scaled(updates: Sequence[Factored], scales: Tensor, *, rank: int) -> LowRankMerge:
    """Σ_k d⁽ᵏ⁾ ∘ ΔW_k for d⁽ᵏ⁾ that scale rows or columns, at the rank of all updates together at most.

    Args:
        updates: One for each adapter, all of shape [m, n].
        scales: d⁽ᵏ⁾, shape [K, m, 1], [K, 1, n] or [K, 1, 1].
        rank: Of the result, at least 1.

    Raises:
        MethodError: if the updates differ in shape, hold NaN or infinity or overflow.
    """
    from isthmus.geometry.linalg import one_thread

    _check(updates, rank)
    by_row = scales.shape[1] > 1
    scaled = [
        Factored(update.left.double() * d, update.right.double())
        if by_row
        else Factored(update.left.double(), update.right.double() * d)
        for update, d in zip(updates, scales.double(), strict=True)
    ]
    with one_thread():
        return LowRankMerge(*stacked(scaled, [1.0] * len(scaled)).recompressed(rank))


def _shifted(update: Factored, shift: int) -> Factored:
    """Both factors times two to that power."""
    return Factored(*(factor.double() * 2.0**shift for factor in update))


def merge_vectors(method: Method, vectors: Sequence[Tensor | None], settings: Settings) -> Tensor:
    """Merge what adapters add to one bias.

    Args:
        method: How; adapters-only methods do as with all that an adapter stores in full.
        vectors: Shape [n] each; None where an adapter adds nothing, which counts as
            zero or takes no part, as the method's `absent_is_zero` says. One at least is not None.
        settings: The method's parameters at this module.

    Returns:
        Shape [n], float64.

    Raises:
        MethodError: if the vectors differ in length or hold NaN or infinity, or the settings admit
            no merge.
    """
    import torch

    shapes = {tuple(vector.shape) for vector in vectors if vector is not None}
    if len(shapes) != 1:
        raise MethodError(
            f"the adapters' biases have the shapes {sorted(map(list, shapes))}",
            "Merge adapters of one base model.",
        )
    (shape,) = shapes
    if not method.absent_is_zero:
        present = [k for k, vector in enumerate(vectors) if vector is not None]
        vectors = [vectors[k] for k in present]
        each = settings.per_expert
        each = {name: tuple(values[k] for k in present) for name, values in each.items()}
        settings = Settings(settings.shared, each)
        if not any(numbers(settings, "weight")):
            return torch.zeros(shape, dtype=torch.float64)
    rows = np.zeros((len(vectors), *shape))
    for row, vector in zip(rows, vectors, strict=True):
        if vector is not None:
            row[:] = vector.double().numpy()
    if not np.isfinite(rows).all():
        raise MethodError("an adapter's bias holds NaN or infinity", "Leave that adapter out.")
    return torch.from_numpy(_merged(method, Coordinates(rows), settings))


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The stream of task vectors that are held in memory, on a base of zeros.

    Attributes:
        stack: Shape [K, ...], float64.
    """

    stack: NDArray[np.float64]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one of them."""
        return self.stack.shape[1:]

    @property
    def itemsize(self) -> int:
        """Eight bytes: float64."""
        return self.stack.itemsize

    def __iter__(self) -> Iterator[Chunk]:
        rows = self.stack.reshape(len(self.stack), -1)
        yield Chunk(0, rows.copy(), np.zeros(rows.shape[1]))


@dataclass(frozen=True, slots=True)
class Products:
    """The stream of full updates, a block of rows of each at a time, on a base of zeros.

    Attributes:
        updates: Matrices of one shape, float64.
    """

    updates: Sequence[Factored]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one of them."""
        return self.updates[0].shape

    @property
    def itemsize(self) -> int:
        """Eight bytes: float64."""
        return 8

    def __iter__(self) -> Iterator[Chunk]:
        rows, columns = self.updates[0].shape
        # Random masks are drawn from multiples of eight elements on.
        height = max(8, CHUNK // max(columns, 1) // 8 * 8)
        for row in range(0, rows, height):
            count = min(height, rows - row)
            experts = np.empty((len(self.updates), count, columns))
            for out, update in zip(experts, self.updates, strict=True):
                np.matmul(update.left[row : row + count].numpy(), update.right.numpy(), out=out)
            flat = experts.reshape(len(experts), -1)
            yield Chunk(row * columns, flat, np.zeros(flat.shape[1]))


def _merged(method: Method, stream: TensorStream, settings: Settings) -> NDArray[np.float64]:
    """All of the merged tensor, in its shape."""
    combine = method.prepare(stream, settings)
    merged = np.empty(stream.shape)
    flat = merged.reshape(-1)
    for chunk in stream:
        values = combine(chunk)
        flat[chunk.start : chunk.start + len(values)] = values
    return merged


def _in_core(
    method: Method, updates: Sequence[Factored], settings: Settings, rank: int
) -> LowRankMerge:
    import torch

    left, right, cores = joint(updates)
    merged = torch.from_numpy(_merged(method, Coordinates(cores.numpy()), settings))
    factor = float(cast("float", settings.shared["lambda"]))
    weights = factor * cores.new_tensor(numbers(settings, "weight"))
    guide = torch.tensordot(weights, cores, dims=1)
    return LowRankMerge(*compressed(left, merged, right, rank, guide=guide))


def _in_knots(
    method: Method, updates: Sequence[Factored], settings: Settings, rank: int
) -> LowRankMerge:
    import torch

    basis = left_basis(updates)
    stack = torch.stack([(basis.mT @ update.left) @ update.right for update in updates])
    merged = torch.from_numpy(_merged(method, Coordinates(stack.numpy()), settings))
    return LowRankMerge(*Factored(basis, merged).recompressed(rank))


def _in_full(
    method: Method, updates: Sequence[Factored], settings: Settings, rank: int
) -> LowRankMerge:
    import torch

    nearest = truncate(_merged(method, Products(updates), settings), rank)
    update = Factored(torch.from_numpy(nearest.left), torch.from_numpy(nearest.right))
    return LowRankMerge(update.padded(rank), nearest.kept)


_MERGES: dict[str, Callable[[Method, Sequence[Factored], Settings, int], LowRankMerge]] = {
    "core": _in_core,
    "knots": _in_knots,
    "full": _in_full,
}


def _known_space(method: Method, space: str | None) -> str:
    if not method.spaces:
        raise MethodError(
            f"{method.name} cannot merge adapters",
            "Apply the adapters to their base model and merge the models (base+adapter), or take "
            "another method: isthmus methods says which merge adapters.",
        )
    if space is None:
        return method.spaces[0]
    if space not in method.spaces:
        raise MethodError(
            f"{method.name} does not merge adapters in the space {space!r}",
            f"Its spaces: {', '.join(method.spaces)}.",
        )
    return space


def _check(updates: Sequence[Factored], rank: int) -> None:
    import torch

    if rank < 1:
        raise MethodError(f"a merged adapter cannot have rank {rank}", "Ask for rank 1 or more.")
    shapes = {update.shape for update in updates}
    if len(shapes) != 1:
        raise MethodError(
            f"the adapters' updates of one module have the shapes {sorted(shapes)}",
            "Merge adapters of one base model.",
        )
    for number, update in enumerate(updates, start=1):
        if not all(bool(torch.isfinite(factor).all()) for factor in update):
            raise MethodError(
                f"the update of adapter {number} of {len(updates)} holds NaN or infinity",
                "The adapter is probably broken. Leave it out.",
            )
        if update.exponent > LARGEST:
            raise MethodError(
                f"the update of adapter {number} of {len(updates)} overflows: its entries are of "
                f"the order of 1e{update.exponent * math.log10(2):.0f}",
                "The adapter is probably broken. Leave it out.",
            )
