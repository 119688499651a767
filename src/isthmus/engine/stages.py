"""Long work that says what it is doing, as stages of a progress."""

from __future__ import annotations

from isthmus.engine.progress import Progress


class Stages:
    """Passes on how much of what is done, a stage for each.

    Args:
        progress: Who listens.
        label: What is worked on; stands before the name of every stage.
    """

    def __init__(self, progress: Progress, label: str = "") -> None:
        self._progress = progress
        self._label = f"{label}: " if label else ""
        self._what = ""
        self._done = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        """So much of that is done, of so much."""
        # A loss in the text changes with every step; what stands before it does not.
        name = what.split(", loss")[0]
        if name != self._what or done < self._done:
            self.finish()
            self._progress.begin(self._label + name, max(total, 1), counts=True)
            self._what, self._done = name, 0
        self._progress.advance(done - self._done)
        self._done = done

    def finish(self) -> None:
        """The last stage is over."""
        if self._what:
            self._progress.finish()
        self._what = ""
