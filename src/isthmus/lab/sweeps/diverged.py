"""A training that diverged is a result, not a failure."""

from __future__ import annotations

from isthmus.errors import TrainingError


class Diverged(TrainingError):  # noqa: N818 (a result)
    """The loss of a training left all bounds; the sweep notes it and goes on.

    Args:
        step: Where.
        loss: There; may be infinite or NaN.
    """

    def __init__(self, step: int, loss: float) -> None:
        super().__init__(
            f"the training diverged: its loss is {loss:g} in step {step}",
            "Lower the learning rate or the momentum.",
        )
        self.step = step
        self.loss = loss

    def __reduce__(self) -> tuple[type[Diverged], tuple[int, float]]:
        return Diverged, (self.step, self.loss)
