"""Progress on a terminal as a bar, elsewhere as plain lines now and then."""

from __future__ import annotations

import sys
import threading
import time

from isthmus.engine.progress import Progress

QUIET_SECONDS = 10.0
"""Plain lines come at most this often."""


def terminal_progress() -> Progress:
    """A bar when stderr is a terminal, lines otherwise."""
    return _Bar() if sys.stderr.isatty() else _Lines()


class _Bar:
    """rich's progress bar on stderr."""

    def begin(self, what: str, total: int, *, counts: bool = False) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            ProgressColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bars

        amount: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()]
        if counts:
            amount = [MofNCompleteColumn()]
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            *amount,
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._bars.add_task(what, total=total)
        self._bars.start()

    def advance(self, done: int) -> None:
        self._bars.advance(self._task, done)

    def finish(self) -> None:
        self._bars.stop()


class _Lines:
    """A line on stderr every few seconds, and none for what is quickly done."""

    def begin(self, what: str, total: int, *, counts: bool = False) -> None:  # noqa: ARG002
        self._what, self._total, self._done = what, total, 0
        self._begun = self._said = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, done: int) -> None:
        with self._lock:
            self._done += done
            now = time.monotonic()
            if now - self._said < QUIET_SECONDS:
                return
            self._said = now
            share = self._done / self._total
            left = (now - self._begun) * (1 - share) / share
        sys.stderr.write(f"{self._what}: {share:.0%}, about {left:.0f} s left\n")

    def finish(self) -> None:
        """Nothing is left to say."""
