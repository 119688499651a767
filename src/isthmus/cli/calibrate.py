"""`isthmus calibrate MODEL`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.text import count


class Activations(Enum):
    """As `isthmus.models.states.Keep`, without torch."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    DISK = "disk"


def command(
    model: Annotated[
        str, typer.Argument(help="A folder, a model on the Hub, or base+adapter, with tokenizer.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            help="Texts: a .jsonl, .json, .csv, .txt or .parquet file or a folder of them. For a "
            "vision model: an image folder or an idx file."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder for the statistics.")],
    column: Annotated[
        str | None,
        typer.Option(help="The column of the texts; by default text, or else messages."),
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Examples to choose at random.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Longer texts are cut after so many.")] = 256,
    seed: Annotated[int, typer.Option(help="Another seed, another choice of examples.")] = 0,
    activations: Annotated[
        Activations,
        typer.Option(help="How activations wait between blocks: in memory, or in temporary files."),
    ] = Activations.FLOAT32,
) -> None:
    """Run a model on examples and keep what merging needs to know of them.

    For every linear layer y = Wx that is the matrix of the sums of x xᵀ over all tokens: with it one
    can say how far a merged layer's outputs are from an expert's, without running the model again.
    Take a hundred examples or so of what the model is for, each expert its own. No labels are needed.

    One block of the model is in memory at a time, with the activations of all examples. Examples are
    chosen by their content: the same file and seed, in any order, give the same choice. A second run
    with the same model and data finds the statistics made.

    \b
    Example:
        isthmus calibrate ./math --data problems.jsonl --column question -o math.stats
    """  # noqa: D301
    from isthmus.checkpoints import open_checkpoint
    from isthmus.cli.progress import terminal_progress
    from isthmus.models.data import calibration_batches
    from isthmus.models.states import Keep
    from isthmus.models.store import store_moments

    progress = terminal_progress()
    begun = False

    def report(_done: int, total: int) -> None:
        nonlocal begun
        if not begun:
            progress.begin("calibrating", total, counts=True)
            begun = True
        progress.advance(1)

    with open_checkpoint(model) as checkpoint:
        batches = calibration_batches(
            checkpoint, data, column=column, examples=examples, tokens=tokens, seed=seed
        )
        try:
            stored, computed = store_moments(
                checkpoint, batches, output, keep=Keep(activations.value), report=report
            )
        finally:
            if begun:
                progress.finish()
    used = count(sum(len(next(iter(batch.values()))) for batch in batches), "example")
    ending = "" if computed else "; complete already, nothing to do"
    typer.echo(f"{output}: inputs of {count(len(stored), 'weight')} on {used}{ending}")
