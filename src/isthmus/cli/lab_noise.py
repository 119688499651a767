"""What `isthmus lab noise` runs."""

from __future__ import annotations

from pathlib import Path

import typer

from isthmus.cli.interrupts import listen_to_kill
from isthmus.lab.noise.grids import Kind
from isthmus.lab.noise.run import run_noise
from isthmus.lab.sweeps.run import Executor
from isthmus.reports.lab_page import write_figures, write_page
from isthmus.reports.noise_lab import noise_figures, noise_page


def run(
    out: Path, cache: Path, kind: Kind, *, quick: bool, workers: int, executor: Executor
) -> None:
    """Train the pairs and write the report, and its figures one by one.

    Args:
        out: Where the runs and results go.
        cache: Where data is.
        kind: Which experiment.
        quick: Whether to make it small.
        workers: Trainings side by side.
        executor: Where they run.

    Raises:
        Exit: With 130, after Ctrl-C.
    """
    listen_to_kill()
    try:
        results = run_noise(
            out, kind=kind, cache=cache, quick=quick, workers=workers, executor=executor
        )
    except KeyboardInterrupt:
        typer.echo("stopped. The same command goes on where it was.", err=True)
        raise typer.Exit(130) from None
    write_page(noise_page(results), out / "report.html")
    write_figures(noise_figures(results), out / "figures")
