"""What a demo run found out, and its JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.lab.candidates import Recipe
from isthmus.lab.evaluate import Row
from isthmus.lab.progress import Stage
from isthmus.lab.results_file import write_results
from isthmus.lab.settings import DemoSettings

if TYPE_CHECKING:
    from isthmus.lab.reactions import ReactionResults


@dataclass(frozen=True)
class Choice:
    """What validation decided for one method.

    Attributes:
        setting: The candidate that was kept, such as ``λ=0.5``.
        recipe: Its recipe.
        validation: By candidate: mean normalised accuracy on validation; empty where there was
            nothing to choose.
    """

    setting: str
    recipe: Recipe
    validation: dict[str, float]

    @property
    def at_edge(self) -> bool:
        """Whether the kept value is the first or last of its grid: one beyond may be better."""
        grid = [*self.validation]
        return len(grid) > 1 and self.setting in (grid[0], grid[-1])


@dataclass(frozen=True)
class DemoResults:
    """Everything that the table and the report show.

    Attributes:
        settings: What was asked for.
        classes: Class names, by task.
        rows: Base, experts, then one row per method.
        choices: By method.
        stages: Times, in order.
        environment: Versions and threads.
        reactions: The merge of rxnfp's fine-tunes, unless it was skipped.
    """

    settings: DemoSettings
    classes: Mapping[str, tuple[str, ...]]
    rows: tuple[Row, ...]
    choices: Mapping[str, Choice]
    stages: tuple[Stage, ...]
    environment: Mapping[str, str]
    reactions: ReactionResults | None

    @property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks, in the order of the columns."""
        return tuple(self.classes)

    @property
    def seconds(self) -> float:
        """Wall time of all stages together."""
        return sum(stage.seconds for stage in self.stages)

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the means written out."""
        values = asdict(self)
        for row, written in zip(self.rows, values["rows"], strict=True):
            written["mean_accuracy"] = row.mean_accuracy
            written["mean_normalised"] = row.mean_normalised
        for method, choice in self.choices.items():
            values["choices"][method]["at_edge"] = choice.at_edge
        values["seconds"] = self.seconds
        return values

    def write(self, path: Path) -> None:
        """Write the JSON form."""
        write_results(path, self.as_json())
