"""What a merge method is: a pure function from one tensor of every model to one tensor.

A method sees a tensor as a stream of chunks that it may read as often as it needs, first to learn
what depends on the whole tensor (a threshold, a norm, a dot product), then to merge. So the same
code merges a tensor that fits the cache and one that does not fit the memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeAlias

from isthmus.methods.parameters import Parameter, ParameterValue
from isthmus.typing import Array

if TYPE_CHECKING:
    from isthmus.geometry.factored import Factored
    from isthmus.methods.adapters import LowRankMerge


@dataclass(frozen=True, slots=True)
class Chunk:
    """The same stretch of one flattened tensor in every model.

    Attributes:
        start: Offset of the first element in the flattened tensor.
        experts: The experts' numbers, shape [K, n], float32 or float64. A method may overwrite it.
        base: The base model's numbers, shape [n], or None.
    """

    start: int
    experts: Array
    base: Array | None


class TensorStream(Protocol):
    """One tensor of every model.

    Iterating reads it once from the start, in chunks of a fixed size; it may be iterated any
    number of times. A chunk's arrays are valid until the next chunk is asked for.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element in the precision of the merge: 4 or 8."""

    def __iter__(self) -> Iterator[Chunk]:
        """Read the tensor once."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A method's parameters at one tensor.

    Attributes:
        shared: Values of the parameters of global scope.
        per_expert: Values of the other parameters, one for each expert.
        seeds: One number below 2**128 for each expert, for methods that draw random numbers. It
            depends on the merge's seed, the tensor and the expert, and on nothing else.
    """

    shared: Mapping[str, ParameterValue | None]
    per_expert: Mapping[str, tuple[ParameterValue | None, ...]]
    seeds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightedSum:
    """sum_k w_k x_k / divisor, element by element.

    Attributes:
        weights: w_k, one for each expert.
        divisor: A number other than zero.
    """

    weights: tuple[float, ...]
    divisor: float


Combine: TypeAlias = Callable[[Chunk], Array]
"""Merges one chunk: shape [n], in the chunk's precision."""


class BaseUse(Enum):
    """What a method does with the base model."""

    REQUIRED = "required"
    """The base is the point from which task vectors are measured, or one end of a path."""
    IGNORED = "ignored"
    """The base counts only when it is listed among the models."""


class Reach(Enum):
    """How much of a tensor one output element depends on; the engine streams by it."""

    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    MATRIX = "matrix"
    """All of it, held at once in float64 for every expert: a decomposition."""


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A merge method.

    Attributes:
        name: The name in a recipe.
        summary: One line.
        reference: Paper and equation or section.
        explanation: A paragraph for `isthmus methods NAME`.
        parameters: What it can be told.
        base: What it does with the base model.
        min_experts, max_experts: How many models besides the base it takes; None for no bound.
        reach: How much of a tensor one output element depends on.
        random: Whether it draws random numbers.
        propagates: Whether NaN or infinity in an input always shows in the output, so that it is
            enough to look there.
        spaces: In which spaces it merges the low-rank updates of adapters, the default first
            (`isthmus.methods.adapters`); none if it cannot.
        adapters_only: Whether it is defined for adapters alone; `prepare` then serves what an
            adapter stores in full.
        gauge: One sentence: whether the merge of adapters depends on their factorisation.
        absent_is_zero: Whether a module that an adapter leaves alone counts as a zero update, or
            the adapter takes no part there.
        compresses: Whether merged updates can be cut to an asked rank.
        adds_ranks: Whether their rank is the sum of the adapters' if none is asked for; otherwise it
            is the largest.
        calibrated: Whether it needs calibration data of every expert, for the network's linear
            layers; `prepare` then serves the other tensors.
    """

    name: str
    summary: str
    reference: str
    explanation: str
    parameters: tuple[Parameter, ...]
    base: BaseUse
    min_experts: int = 1
    max_experts: int | None = None
    reach: Reach = Reach.ELEMENTWISE
    random: bool = False
    propagates: bool = False
    spaces: tuple[str, ...] = ()
    adapters_only: bool = False
    gauge: str = ""
    absent_is_zero: bool = True
    compresses: bool = True
    adds_ranks: bool = False
    calibrated: bool = False

    def check(self, settings: Settings) -> None:  # noqa: B027
        """Refuse settings that admit no merge, before any tensor is read.

        Raises:
            MethodError: naming the parameter and the cure.
        """

    def weighted_sum(self, settings: Settings) -> WeightedSum | None:  # noqa: ARG002
        """What the merge is, if it is a weighted sum and nothing more, else None.

        An engine may then merge the bits as they are stored, where that gives the same bits.
        """
        return None

    def coefficients(self, settings: Settings) -> tuple[float, ...] | None:  # noqa: ARG002
        """c_k if the merge of task vectors τ_k is sum_k c_k τ_k and nothing more, else None.

        Such a merge is the same in every space, and needs none.
        """
        return None

    def merge_low_rank(
        self, updates: Sequence[Factored], settings: Settings, rank: int
    ) -> LowRankMerge:
        """Merge the adapters' updates of one module, if `adapters_only`.

        Args:
            updates: One for each expert, all of one shape, finite; zero where an adapter leaves
                the module alone.
            settings: The parameters at this module.
            rank: Of the result, at least 1.

        Raises:
            MethodError: if the settings admit no merge.
        """
        # Not abstract: methods that run on coordinates of the updates are never asked.
        raise NotImplementedError(f"{self.name} merges adapters by its coordinates")

    @abstractmethod
    def prepare(self, tensor: TensorStream, settings: Settings) -> Combine:
        """Read what depends on the whole tensor and return the function that merges chunks.

        Raises:
            MethodError: if the settings admit no merge.
        """
