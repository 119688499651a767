"""What a running merge tells: the engine speaks, a terminal or a log listens."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Listens to a merge. Called from several threads."""

    def begin(self, what: str, total: int, *, counts: bool = False) -> None:
        """A stage of so many output bytes begins, or if `counts` of so many steps."""

    def advance(self, done: int) -> None:
        """So many more bytes or steps are done."""

    def finish(self) -> None:
        """The stage is over, well or badly."""


class Silent:
    """Says nothing."""

    def begin(self, what: str, total: int, *, counts: bool = False) -> None:
        """Say nothing."""

    def advance(self, done: int) -> None:
        """Say nothing."""

    def finish(self) -> None:
        """Say nothing."""
