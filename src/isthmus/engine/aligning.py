"""Models that are moved along their symmetries before they are merged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from threadpoolctl import threadpool_limits

from isthmus.checkpoints import Checkpoint
from isthmus.checkpoints.base import Source
from isthmus.engine.progress import Progress
from isthmus.recipes import Recipe
from isthmus.recipes.align import Align

if TYPE_CHECKING:
    from isthmus.models.aligned_view import AlignedView


def aligned(recipe: Recipe, opened: Mapping[str, Checkpoint], stays: str) -> dict[str, Checkpoint]:
    """The recipe's models, all but one in views that move them once `settle` has run.

    What can be known from headers and configurations is known here.

    Args:
        recipe: With `align:`.
        opened: By the names that the recipe uses.
        stays: The model that the others are aligned to.

    Raises:
        SymmetryError: The symmetries are not known, or a model has other tensors or shapes.
    """
    from isthmus.models.aligned_view import AlignedView
    from isthmus.models.alignment import named_alike, symmetries

    assert recipe.align is not None
    reference = opened[stays]
    symmetries(reference, recipe.align.residual)
    moves = {entry.model for entry in recipe.models} - {stays}
    result: dict[str, Checkpoint] = {}
    for name, checkpoint in opened.items():
        if name in moves:
            named_alike(reference, checkpoint)
        result[name] = AlignedView(checkpoint, reference) if name in moves else checkpoint
    return result


def settle(models: Sequence[Source], align: Align | None, progress: Progress) -> list[str]:
    """Find how every model moves; the same whatever the number of processors.

    Args:
        models: Of a plan; those that move are `AlignedView`.
        align: How.
        progress: Who listens.

    Returns:
        What was done, one sentence a model.

    Raises:
        SymmetryError: A network's function would change.
    """
    if align is None:
        return []
    from isthmus.models.aligned_view import AlignedView

    return [_settled(view, align, progress) for view in models if isinstance(view, AlignedView)]


def _settled(view: AlignedView, align: Align, progress: Progress) -> str:
    from isthmus.geometry.linalg import one_thread
    from isthmus.models.alignment import align_checkpoint

    # Sums of another order have other last digits, and a resumed merge must find the same element.
    with one_thread(), threadpool_limits(limits=1), _told(progress, view.label) as step:
        found = align_checkpoint(
            view.reference, view.moved, residual=align.residual, seed=align.seed, progress=step
        )
    view.alignment = found
    matching = found.matching
    return (
        f"{view.label} was aligned to {view.reference.label}: relative distance "
        f"{matching.distance:.3g}, before {matching.before:.3g}"
        + ("" if matching.converged else "; the descent had not ended")
        + (
            f"; it was not run to see that its function stays, since {found.unchecked}"
            if found.check is None
            else f"; its outputs differ by {found.check.error:.1e} in float64"
        )
    )


@contextmanager
def _told(progress: Progress, label: str) -> Iterator[_Visits]:
    visits = _Visits(progress, label)
    try:
        yield visits
    finally:
        visits.finish()


class _Visits:
    """Tells a listener of sweeps: every one is a stage of as many steps as there are axes visited before."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress, self._label = progress, label
        self._sweep = -1
        self._count = 0
        self._last = 0

    def __call__(self, sweep: int, _axis: str) -> None:
        """An axis is visited in that sweep."""
        if sweep != self._sweep:
            self._last = self._count
            self.finish()
            self._progress.begin(
                f"aligning {self._label}, sweep {sweep}", max(self._last, 1), counts=True
            )
            self._sweep, self._count = sweep, 0
        self._count += 1
        self._progress.advance(1)

    def finish(self) -> None:
        """The sweep is over."""
        if self._sweep >= 0:
            self._progress.finish()
