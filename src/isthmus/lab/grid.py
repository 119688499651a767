"""Results as a table."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True)
class Grid:
    """A table, for a terminal and for a page.

    Attributes:
        title: What it shows.
        columns: Headings; the first column is text, the others are figures.
        rows: As many cells each as there are headings.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def table(self) -> Table:
        """For a terminal of 80 columns: headings fold, figures do not."""
        table = Table(title=self.title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        table.add_column(self.columns[0], overflow="fold")
        for name in self.columns[1:]:
            table.add_column(name, justify="right", overflow="fold", min_width=4)
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table
