"""Figures for HTML reports: SVG text that stands in the page itself."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from isthmus.lab.evaluate import Row
from isthmus.lab.tables import label

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
"""Okabe and Ito's scheme, which the colour-blind can tell apart."""

MARKERS = ("o", "s", "^", "D", "v", "P")
"""Shapes besides colours, for prints without them."""


def accuracy_figure(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    """Draw normalised accuracy, a line per encoder and a mark per task.

    Args:
        rows: The encoders, top to bottom.
        tasks: The tasks, in the order of the legend.

    Returns:
        An ``<svg>`` element, the same text for the same numbers.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    height = 0.5 / len(tasks)
    # A fixed salt and no date make the file the same on every run.
    with rc_context({"svg.hashsalt": "isthmus", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8.5, 1.5 + 0.42 * len(rows)), layout="constrained")
        axes = figure.subplots()
        for index, task in enumerate(tasks):
            places = [place + (index - (len(tasks) - 1) / 2) * height for place in range(len(rows))]
            values = [100 * row.normalised[task] for row in rows]
            axes.plot(
                values,
                places,
                linestyle="none",
                marker=MARKERS[index % len(MARKERS)],
                color=COLOURS[index % len(COLOURS)],
                label=plain(task),
            )
        axes.axvline(100, color="black", linewidth=0.8)
        axes.grid(axis="x", linewidth=0.4)
        axes.set_yticks(range(len(rows)), [plain(label(row)) for row in rows])
        axes.invert_yaxis()
        axes.set_xlabel("test accuracy, % of the task's own expert")
        figure.suptitle("What every encoder keeps of each expert's accuracy")
        figure.legend(loc="outside lower center", ncols=len(tasks), frameon=False)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return svg_element(buffer.getvalue())


def drawn(draw: Callable[[Any], None], size: tuple[float, float]) -> str:
    """A figure as an ``<svg>`` element, the same text every time.

    Args:
        draw: Draws on a matplotlib figure.
        size: Width and height in inches.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    # A fixed salt and no date make the file the same on every run.
    with rc_context({"svg.hashsalt": "isthmus", "svg.fonttype": "none"}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return svg_element(buffer.getvalue())


def plain(text: str) -> str:
    """A label that matplotlib takes as it is: no mathematics, no hidden legend entry."""
    return text.replace("$", r"\$").lstrip("_")


def svg_element(svg: str) -> str:
    """The ``<svg>`` element alone, without prologue, metadata and namespace of links to outside."""
    body = svg[svg.index("<svg") :]
    return re.sub(r"\s*<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
