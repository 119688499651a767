"""What the suites with several tasks and seeds have in common: settings, and tables over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import stdev
from typing import Literal, Protocol, Self

from isthmus.lab.evaluate import Row, mean_row
from isthmus.lab.progress import Stage
from isthmus.lab.settings import DemoSettings, FineTuning, Sizes


@dataclass(frozen=True, kw_only=True)
class SuiteSettings:
    """What decides the numbers of every suite.

    Attributes:
        family: ``text`` or ``vision``.
        seeds: Each fixes the draw of the examples, starts, the order of training and the draws of random
            methods.
        sizes: By task, two at least.
        fine_tuning: How is trained; its seed is replaced by each of `seeds`.
        inverse_penalty: ``C`` of the linear probes that serve as heads.
        tries: How many settings a method may look at on validation; three at least.
        threads: Threads that torch computes with.
    """

    family: Literal["text", "vision"] = "text"
    seeds: tuple[int, ...] = (0, 1, 2)
    sizes: Mapping[str, Sizes]
    fine_tuning: FineTuning
    inverse_penalty: float = 1.0
    tries: int = 6
    threads: int = 2

    def quick(self) -> Self:
        """The same with a fifth of the examples and half of the tries: to see it run."""
        return replace(
            self,
            sizes={
                task: Sizes(size.train // 5, size.validation // 5, size.test // 5, size.max_length)
                for task, size in self.sizes.items()
            },
            tries=3,
        )

    def at(self, seed: int) -> DemoSettings:
        """What heads and experts or adapters of one seed are trained with."""
        return DemoSettings(
            sizes=self.sizes,
            fine_tuning=replace(self.fine_tuning, seed=seed),
            inverse_penalty=self.inverse_penalty,
            seed=seed,
            threads=self.threads,
        )


class SuiteSeed(Protocol):
    """One seed's results."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The base, single experts or adapters, then one row per merge."""


class SuiteResults:
    """What is said over seeds, which all have the same rows."""

    classes: Mapping[str, tuple[str, ...]]
    seeds: Sequence[SuiteSeed]
    stages: tuple[Stage, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, in the order of the columns."""
        return tuple(self.classes)

    @property
    def seconds(self) -> float:
        """Wall time of all stages together."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def rows(self) -> tuple[Row, ...]:
        """Means over the seeds."""
        return tuple(
            mean_row(same) for same in zip(*(seed.rows for seed in self.seeds), strict=True)
        )

    def spread(self, name: str) -> float | None:
        """Standard deviation over the seeds of a row's mean normalised accuracy; None for one."""
        values = [
            row.mean_normalised for seed in self.seeds for row in seed.rows if row.name == name
        ]
        return stdev(values) if len(values) > 1 else None
