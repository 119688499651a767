"""`isthmus lab noise`: train the pairs, draw gains against knobs and noise."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isthmus.lab.grid import Grid
from isthmus.lab.machine import environment
from isthmus.lab.noise.grids import Kind, noise_grid
from isthmus.lab.noise.results import Panel, panel
from isthmus.lab.noise.tables import collapse_grid, optimum_grid, remarks, similarity_grid
from isthmus.lab.progress import Narrator
from isthmus.lab.results_file import write_results
from isthmus.lab.sweeps.experiments import experiment_of
from isthmus.lab.sweeps.run import Executor, run_sweep


@dataclass(frozen=True)
class NoiseResults:
    """All panels.

    Attributes:
        experiment: Of the sweep.
        panels: In the order of the report.
        seconds: Of all trainings together, each on one core.
        environment: Versions.
    """

    experiment: str
    panels: tuple[Panel, ...]
    seconds: float
    environment: dict[str, str]

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The tables that sum up; those without rows are left out."""
        made = (collapse_grid, optimum_grid, similarity_grid)
        return tuple(grid for make in made if (grid := make(self.panels)).rows)

    def write(self, path: Path) -> None:
        """As JSON; curves without their points, which stand beside them."""
        write_results(
            path,
            {
                "environment": self.environment,
                "experiment": self.experiment,
                "seconds": round(self.seconds, 1),
                "panels": [_panel(each) for each in self.panels],
            },
            indent=1,
        )


def run_noise(
    output: Path,
    *,
    kind: Kind = "pairs",
    cache: Path = Path(".cache"),
    quick: bool = False,
    workers: int = 2,
    executor: Executor = "local",
    narrator: Narrator | None = None,
) -> NoiseResults:
    """Train what is not trained yet, write ``results.json``, print the tables.

    Args:
        output: The sweep's folder; made if it is missing, gone on with if it is there.
        kind: Which experiment.
        cache: Where `make data` put its data.
        quick: A coarse grid.
        workers: Trainings side by side.
        executor: Where they run.
        narrator: Shows the progress; on standard output by default.

    Raises:
        IsthmusError: Data are missing, or the folder is another sweep's or in use.
    """
    told = Narrator() if narrator is None else narrator
    grid = noise_grid(kind, quick=quick)
    records = run_sweep(
        grid.sweep, output, workers=workers, executor=executor, cache=cache, narrator=told
    )
    experiment = experiment_of(grid.experiment)
    results = NoiseResults(
        grid.experiment,
        tuple(panel(each, experiment, records) for each in grid.panels),
        sum(record.seconds for record in records),
        environment(threads=1),
    )
    results.write(output / "results.json")
    for each in results.grids:
        told.console.print(each.table())
    for line in remarks(results.panels):
        told.say(line)
    told.say(f"Results are in {output / 'results.json'}")
    return results


def _panel(found: Panel) -> dict[str, Any]:
    return {
        "name": found.name,
        "figure": found.figure,
        "spreads": {knob: curve.spread for knob, curve in found.curves.items()},
        "bandwidths": {knob: curve.bandwidth for knob, curve in found.curves.items()},
        "optimum": None if found.highest is None else asdict(found.highest),
        "points": [asdict(point) for point in found.points],
    }
