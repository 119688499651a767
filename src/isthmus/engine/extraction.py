"""What an extraction is asked for, and what came of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from isthmus.errors import PlanError
from isthmus.geometry.truncation import Truncation, truncate, truncate_to_energy

DEFAULT_RANK = 32


@dataclass(frozen=True, slots=True)
class Ranks:
    """How the rank of a module's update is chosen.

    Attributes:
        rank: The rank everywhere, or None.
        energy: The share of the squared Frobenius norm of each module's change to keep, or None.
        least: With `energy`, the smallest rank.
        most: With `energy`, the largest, or None.
    """

    rank: int | None
    energy: float | None
    least: int
    most: int | None

    @classmethod
    def chosen(
        cls, rank: int | None, energy: float | None, least: int | None, most: int | None
    ) -> Ranks:
        """The rule that the options come to.

        Raises:
            PlanError: if they contradict each other.
        """
        if energy is None:
            if least is not None or most is not None:
                raise PlanError(
                    "the smallest and the largest rank say something about --energy only",
                    "Give --energy too, or --rank alone.",
                )
            rank = DEFAULT_RANK if rank is None else rank
            if rank < 1:
                raise PlanError(f"{rank} is no rank", "Use 1 or more.")
            return cls(rank, None, 1, None)
        if rank is not None:
            raise PlanError("rank and energy exclude each other", "Choose one of them.")
        if not 0 < energy <= 1:
            raise PlanError(f"{energy} is no share of energy", "Use a number such as 0.9.")
        least = 1 if least is None else least
        if least < 1 or (most is not None and most < least):
            raise PlanError(
                f"no rank lies between {least} and {most}",
                "The smallest rank must be 1 or more, and the largest not below it.",
            )
        return cls(None, energy, least, most)

    def expected(self, largest: int) -> int:
        """The rank of an update that could have `largest`, as far as the change tells nothing."""
        return min(self.least if self.rank is None else self.rank, largest)

    def apply(self, matrix: NDArray[np.float64]) -> Truncation:
        """The low-rank approximation of a module's change."""
        if self.energy is None:
            assert self.rank is not None
            return truncate(matrix, self.rank)
        return truncate_to_energy(matrix, self.energy, self.least, self.most)


@dataclass(frozen=True, slots=True)
class ExtractedModule:
    """What became of one module's change.

    Attributes:
        module: Its name.
        shape: Of its update: outputs and inputs.
        rank: Of its update.
        kept: The share of the squared Frobenius norm of the change that the update holds.
        energy: That squared norm.
        change: The norm of the change relative to that of the base's weight.
    """

    module: str
    shape: tuple[int, int]
    rank: int
    kept: float
    energy: float
    change: float


@dataclass(frozen=True, slots=True)
class TensorChange:
    """A tensor that changed and got no LoRA.

    Attributes:
        name: Its name.
        energy: The squared norm of the change; that of the tensor itself if it is new.
        change: The norm of the change relative to that of the base's tensor; None if the base has
            none of this shape.
    """

    name: str
    energy: float
    change: float | None


@dataclass(frozen=True, slots=True)
class Extraction:
    """What an extraction did.

    Attributes:
        out: The adapter's folder.
        modules: The modules with LoRA, in the order of the fine-tune.
        saved: Changed or new tensors that the adapter stores in full.
        left_out: Changed or new tensors that it lacks.
        unchanged: How many modules for LoRA and other tensors are as in the base.
        notes: What the user should know.
    """

    out: Path
    modules: tuple[ExtractedModule, ...]
    saved: tuple[TensorChange, ...]
    left_out: tuple[TensorChange, ...]
    unchanged: int
    notes: tuple[str, ...]

    @property
    def kept(self) -> float:
        """The share of the squared norm of the change of all modules with LoRA that is kept."""
        return self._held() / math.fsum(m.energy for m in self.modules)

    @property
    def kept_of_everything(self) -> float:
        """The same of the change of all tensors that the base has too."""
        saved = math.fsum(t.energy for t in self.saved if t.change is not None)
        lost = math.fsum(t.energy for t in self.left_out if t.change is not None)
        lora = math.fsum(m.energy for m in self.modules)
        return (self._held() + saved) / (lora + saved + lost)

    def _held(self) -> float:
        return math.fsum(m.kept * m.energy for m in self.modules)
