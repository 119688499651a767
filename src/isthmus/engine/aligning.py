"""Models that are moved along their symmetries before they are merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from threadpoolctl import threadpool_limits

from isthmus.checkpoints import Checkpoint
from isthmus.checkpoints.base import Source, SourceFile
from isthmus.engine.progress import Progress
from isthmus.engine.stages import Stages
from isthmus.recipes import Recipe
from isthmus.recipes.align import Align

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.models.aligned_view import AlignedView

_BY = {
    "weights": "weights",
    "activations": "activations",
    "learned": "the loss between the two, from a match by weights",
}


def aligned(recipe: Recipe, opened: Mapping[str, Checkpoint], stays: str) -> dict[str, Checkpoint]:
    """The recipe's models, all but one in views that move them once `settle` has run.

    What can be known from headers and configurations is known here.

    Args:
        recipe: With `align:`.
        opened: By the names that the recipe uses.
        stays: The model that the others are aligned to.

    Raises:
        SymmetryError: The symmetries are not known, there is no such axis, or a model has other tensors or
            shapes.
        CalibrationError: The examples cannot be read.
    """
    from isthmus.models.aligned_view import AlignedView
    from isthmus.models.alignment import chosen_axes, named_alike
    from isthmus.models.checkpoint_tensors import symmetries
    from isthmus.models.widened_view import at_width_of

    assert recipe.align is not None
    reference = opened[stays]
    spec = symmetries(reference, recipe.align.residual).spec
    chosen_axes(spec, recipe.align.axes, reference.label)
    data = _Data(recipe, reference)
    moves = {entry.model for entry in recipe.models} - {stays}
    result: dict[str, Checkpoint] = {}
    for name, checkpoint in opened.items():
        result[name] = checkpoint
        if name in moves:
            grown = at_width_of(checkpoint, reference, recipe.align.residual)
            named_alike(reference, grown)
            result[name] = AlignedView(grown, reference, data.batches, data.files)
    return result


class _Data:
    """What models are run on, and the files that it is from."""

    def __init__(self, recipe: Recipe, reference: Checkpoint) -> None:
        align = recipe.align
        assert align is not None
        self.batches: list[dict[str, Tensor]] = []
        self.files: tuple[SourceFile, ...] = ()
        if align.data is None:
            return
        from isthmus.models.data import calibration_batches

        path = align.calibration.path(recipe.root)
        self.batches = calibration_batches(
            reference,
            path,
            column=align.column,
            examples=align.examples,
            tokens=align.tokens,
            seed=align.seed,
        )
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        self.files = tuple(SourceFile.of(file, file.stat()) for file in files if file.is_file())


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
    from isthmus.models.widened_view import WidenedView

    listener = Stages(progress, view.label)
    # Sums of another order have other last digits, and a resumed merge must find the same element.
    with one_thread(), threadpool_limits(limits=1):
        try:
            found = align_checkpoint(
                view.reference,
                view.moved,
                by=align.by,
                batches=view.batches,
                residual=align.residual,
                axes=align.axes,
                steps=align.steps,
                seed=align.seed,
                told=listener,
            )
        finally:
            listener.finish()
    view.alignment = found
    matching = found.matching
    grown = len(view.moved.axes) if isinstance(view.moved, WidenedView) else 0
    return (
        (
            f"{view.label} grew to the width of {view.reference.label} on {grown} axes; "
            if grown
            else ""
        )
        + f"{view.label} was aligned to {view.reference.label} by {_BY[align.by]}: relative distance "
        f"{matching.distance:.3g}, before {matching.before:.3g}"
        + ("" if matching.converged else "; the descent had not ended")
        + (
            f"; it was not run to see that its function stays, since {found.unchecked}"
            if found.check is None
            else f"; its outputs differ by {found.check.error:.1e} in float64"
        )
    )
