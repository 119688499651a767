"""How far a sweep is, and when it will be over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from isthmus.lab.progress import Narrator
from isthmus.lab.sweeps.record import RunRecord

_QUIET = 30.0
"""Seconds between two lines where there is no terminal."""


class Telling:
    """Counts runs; see `telling`."""

    def __init__(self, narrator: Narrator, total: int, before: Sequence[RunRecord]) -> None:
        self._narrator = narrator
        self._total = total
        self._counts = Counter(record.status for record in before)
        self._before = len(before)
        self._shares: dict[str, float] = {}
        self._begun = monotonic()
        self._said = self._begun
        self.failures: list[RunRecord] = [each for each in before if each.status == "failed"]
        self._bar: Progress | None = None

    def share(self, name: str, share: float) -> None:
        """A run is so far."""
        self._shares[name] = share
        self._show()

    def over(self, record: RunRecord) -> None:
        """A run is over."""
        self._shares.pop(record.name, None)
        self._counts[record.status] += 1
        if record.status == "failed":
            self.failures.append(record)
            self._narrator.say(f"Run {record.name} failed: {record.error}")
        self._show()

    @property
    def line(self) -> str:
        """In words."""
        over = self._counts.total()
        parts = [f"{over} of {self._total} runs"]
        parts += [
            f"{self._counts[name]} {name}" for name in ("diverged", "failed") if self._counts[name]
        ]
        done = over - self._before + sum(self._shares.values())
        if done > 0 and over < self._total:
            left = (monotonic() - self._begun) / done * (self._total - self._before - done)
            parts.append(f"about {_time(left)} left")
        return ", ".join(parts)

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0], completed=self._counts.total(), description=self.line
            )
        elif monotonic() - self._said > _QUIET:
            self._said = monotonic()
            self._narrator.say(self.line)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """As a bar on a terminal."""
        if not self._narrator.console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._narrator.console, transient=True) as self._bar:
            self._bar.add_task(self.line, total=self._total, completed=self._before)
            yield
        self._bar = None


@contextmanager
def telling(narrator: Narrator, total: int, before: Sequence[RunRecord]) -> Iterator[Telling]:
    """Tell of a sweep's progress: a bar on a terminal, elsewhere a line every half minute.

    Args:
        narrator: Says it.
        total: Runs of the sweep.
        before: Those that were over before.
    """
    told = Telling(narrator, total, before)
    if before:
        narrator.say(f"{len(before)} of {total} runs were over before")
    with told.shown():
        yield told
    narrator.say(told.line)


def _time(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{max(1, round(seconds))} s"
