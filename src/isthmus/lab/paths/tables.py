"""The experiments' tables."""

from __future__ import annotations

from isthmus.lab.grid import Grid
from isthmus.lab.paths.results import PathResults


def grid_of(results: PathResults) -> Grid:
    """One line for each group of pairs, alignment and path: means, with standard deviations over pairs."""
    rows = []
    for line in results.lines:
        cells = [
            f"{line.means[name]:.3f}"
            + (f" ±{line.spreads[name]:.3f}" if name in line.spreads else "")
            if name in line.means
            else ""
            for name in results.figures
        ]
        rows.append((line.group, line.alignment, line.path, str(line.pairs), *cells))
    return Grid(
        f"{results.experiment}: means and standard deviations over pairs",
        ("networks", "aligned by", "path", "pairs", *results.figures.values()),
        tuple(rows),
    )
