"""`isthmus`: the five verbs, as far as they exist, and their helpers.

Commands import what they need when they run, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from isthmus.cli import (
    advise,
    align,
    calibrate,
    connect,
    demo,
    extract,
    inspect,
    lab,
    merge,
    methods,
    verify,
)
from isthmus.cli.streams import give_up_what_is_left, open_streams, tell_error
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
app.command("merge", short_help="Merge the models of a recipe into a folder.")(merge.command)
app.command("inspect", short_help="Say what models are and whether they can be merged.")(
    inspect.command
)
app.command("extract", short_help="Turn a fine-tune into a LoRA adapter of its base.")(
    extract.command
)
app.command("align", short_help="Move a model along its symmetries next to another one.")(
    align.command
)
app.command("connect", short_help="Say whether two models are joined by a path of low loss.")(
    connect.command
)
app.command("advise", short_help="Say whether models trained like this will merge.")(advise.command)
app.command("calibrate", short_help="Run a model on examples; keep its layers' statistics.")(
    calibrate.command
)
app.command("methods", short_help="List the merge methods, or explain one.")(methods.command)
app.command("verify", short_help="Compare every byte of a merge with its manifest.")(verify.command)
app.command("demo", short_help="Fine-tune three real experts, merge and compare them.")(
    demo.command
)
app.add_typer(lab.app, name="lab")


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
    """Run the command line and leave: whatever goes wrong is one message and an exit status."""
    open_streams()
    status: int | str | None = 1
    try:
        status = _run_app()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, `head` say, has gone; nothing more can be said to it.
        status = 1
    except OSError as error:
        # What is printed has no file name.
        where = error.filename or "the output cannot be written"
        tell_error(f"error: {where}: {error.strerror or error}")
        status = 1
    give_up_what_is_left()
    sys.exit(status)


def _run_app() -> int | str | None:
    """The exit status; errors of ours are told, as JSON to those who asked for JSON."""
    try:
        app()
    except SystemExit as leaving:
        return leaving.code
    except IsthmusError as error:
        if "--json" in sys.argv[1:]:
            data = {"error": error.problem, "cure": error.cure}
            typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
        else:
            tell_error(f"error: {error}")
    return 1
