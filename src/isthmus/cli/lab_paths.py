"""What `isthmus lab paths` runs."""

from __future__ import annotations

from pathlib import Path

from isthmus.lab.paths.run import Experiment, run_paths
from isthmus.reports.lab_page import write_figures, write_page
from isthmus.reports.paths_lab import paths_figures, paths_page


def run(experiment: Experiment, out: Path, cache: Path, *, quick: bool) -> None:
    """Run an experiment and write its report.

    Args:
        experiment: ``mlp``, ``many``, ``resnet`` or ``gpt2``.
        out: Where results go.
        cache: Where data is, and where networks are kept.
        quick: Whether to make it small.
    """
    results = run_paths(experiment, out, cache=cache, quick=quick)
    write_page(paths_page(results), out / "report.html")
    write_figures(paths_figures(results), out / "figures")
