"""`isthmus demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    output: Annotated[Path, typer.Option(help="Where experts, merges and the report go.")] = Path(
        "demo"
    ),
) -> None:
    """Show it all."""
    raise SystemExit(output)
