"""What `isthmus lab paths` runs."""

from __future__ import annotations

from pathlib import Path

from isthmus.lab.paths.run import Experiment, run_paths


def run(experiment: Experiment, out: Path, cache: Path, *, quick: bool) -> None:
    """Run an experiment.

    Args:
        experiment: ``mlp``, ``many``, ``resnet`` or ``gpt2``.
        out: Where results go.
        cache: Where data is, and where networks are kept.
        quick: Whether to make it small.
    """
    run_paths(experiment, out, cache=cache, quick=quick)
