"""What methods that look at data do before tensors are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from isthmus.engine.progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.checkpoints import Checkpoint

REPORT = "projection.json"
"""What was found out on calibration data, in the output folder."""

FOLDER = "layers"
"""Where results lie until the merge is finished, in the work folder."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage found out.

    Attributes:
        texts: Further files of the output, by name.
        notes: What the user should know.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Stage(Protocol):
    """A part of a merge that runs networks, in one process and before all else."""

    @property
    def digest(self) -> str:
        """Identifies its result: same digest and same models, same numbers."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors of the base that it merges."""

    @property
    def view(self) -> Checkpoint:
        """The merged model; its tensors can be read when `run` is over."""

    @property
    def peak_memory(self) -> int:
        """Bytes of matrices in memory at once; activations come on top."""

    @property
    def bytes_kept(self) -> int:
        """Bytes on disk until the merge is finished."""

    def run(self, folder: Path, progress: Progress) -> StageReport:
        """Merge what is not in the folder yet.

        Args:
            folder: Where results are kept, made if it is missing.
            progress: Who listens.

        Raises:
            CalibrationError: if a model cannot be run on its examples.
            MethodError: if something cannot be merged.
            NonFiniteError: if a weight holds NaN or infinity.
            OutputError: if the disk is full.
        """

    def multipliers(self, tensor: str) -> Tensor | None:
        """How the task vectors of a tensor are scaled; None where it is averaged.

        Returns:
            Of a shape that broadcasts to [K, m, n].
        """


class Steps:
    """Tells a listener of steps, the number of which the first step tells."""

    def __init__(self, progress: Progress, what: str) -> None:
        self._progress, self._what = progress, what
        self._begun = False

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        if self._begun:
            self._progress.finish()

    def __call__(self, _done: int, total: int) -> None:
        """One more of `total` steps is done."""
        if not self._begun:
            self._progress.begin(self._what, total, counts=True)
            self._begun = True
        self._progress.advance(1)
