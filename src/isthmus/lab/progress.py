"""What a long run tells its reader: bars on a terminal, plain lines elsewhere, time per stage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


@dataclass(frozen=True)
class Stage:
    """A finished stage.

    Attributes:
        name: What was done.
        seconds: By the clock on the wall.
        cpu_seconds: User time of all threads; says more on a machine that others use too.
    """

    name: str
    seconds: float
    cpu_seconds: float


class Narrator:
    """Shows the stages of a run as they pass, and remembers their times.

    Args:
        console: Where to write; standard output by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = Console() if console is None else console
        self.stages: list[Stage] = []

    def say(self, line: str) -> None:
        """Print one line, exactly as it is."""
        self.console.print(line, markup=False, highlight=False)

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
        """Time a stage; the function that it yields is told how many units are done.

        Args:
            name: What is being done, for people.
            total: How many units there are, if that is known.
        """
        wall, cpu = time.perf_counter(), os.times().user
        if self.console.is_terminal:
            columns = (
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
            )
            with Progress(*columns, console=self.console, transient=True) as progress:
                bar = progress.add_task(name, total=total)
                yield lambda units: progress.advance(bar, units)
        else:
            self.console.print(f"{name} ...", end=" ", markup=False, highlight=False)
            yield lambda _: None
        stage = Stage(name, time.perf_counter() - wall, os.times().user - cpu)
        self.stages.append(stage)
        opening = f"{name} ... " if self.console.is_terminal else ""
        self.say(f"{opening}{stage.seconds:.1f} s (CPU {stage.cpu_seconds:.1f} s)")
