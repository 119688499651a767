"""What `isthmus lab two-layer` runs."""

from __future__ import annotations

from pathlib import Path

from isthmus.lab.two_layer import run_two_layer


def run(out: Path, *, quick: bool) -> None:
    """Run the experiment.

    Args:
        out: Where results go.
        quick: Whether to make it small.
    """
    run_two_layer(out, quick=quick)
