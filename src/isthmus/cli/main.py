"""`isthmus`: the five verbs, as far as they exist, and their helpers.

Commands import what they need when they run, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from isthmus.cli import demo, inspect, merge, methods, verify
from isthmus.errors import IsthmusError

app = typer.Typer(
    name="isthmus",
    help=(
        "Merge neural networks, in bounded memory and without losing anything.\n\n"
        "Write a recipe (mergekit's YAML works), look at it with `isthmus merge RECIPE OUT "
        "--dry-run`, then run it. `isthmus methods` lists what a recipe may ask for, `isthmus "
        "inspect A B` says whether models fit together."
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("merge")(merge.command)
app.command("inspect")(inspect.command)
app.command("methods")(methods.command)
app.command("verify")(verify.command)
app.command("demo")(demo.command)


def _print_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"isthmus {version('isthmus')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """The command line."""


def run() -> None:
    """Entry point: errors of ours become one message and an exit status."""
    try:
        app()
    except IsthmusError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
    except BrokenPipeError:
        # The reader, `head` say, has gone; nothing more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
