"""`isthmus verify OUT`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.text import count


def command(
    out: Annotated[Path, typer.Argument(help="A folder that `isthmus merge` wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare every byte of a merge with its manifest.

    Exits with 1 when a file or tensor is missing or was changed.
    """
    from isthmus.engine.verify import verify

    found = verify(out)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        for problem in found.problems:
            typer.echo(f"{out}: {problem}", err=True)
        if not found.problems:
            typer.echo(
                f"{out}: {count(found.tensors, 'tensor')} in {count(found.files, 'file')}, "
                f"{found.bytes:,} bytes, all as written"
            )
    if found.problems:
        raise typer.Exit(1)
