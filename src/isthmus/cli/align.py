"""`isthmus align A B -o OUT`."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from isthmus.cli.interrupts import listen_to_kill
from isthmus.cli.text import printable


class Match(Enum):
    """What is matched."""

    WEIGHTS = "weights"
    ACTIVATIONS = "activations"
    LEARNED = "learned"


class Residual(Enum):
    """Which group moves the residual stream."""

    AUTO = "auto"
    NONE = "none"
    PERMUTATION = "permutation"
    SIGNED = "signed"


def command(
    reference: Annotated[
        str,
        typer.Argument(metavar="A", help="The model that stays: a folder, a file, or a Hub id."),
    ],
    moved: Annotated[str, typer.Argument(metavar="B", help="The model that moves next to it.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="B in A's coordinates; must be new, empty or ours.")
    ],
    match: Annotated[
        Match,
        typer.Option(
            help="weights: no data, and a few tensors in memory; activations: units that fire together on "
            "data; learned: from the match by weights on, what lowers the loss halfway between the two, on "
            "data. The last two hold both models in memory."
        ),
    ] = Match.WEIGHTS,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Texts or pictures for activations and learned, as `isthmus calibrate` takes them.",
            show_default=False,
        ),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(help="The column of the texts.", show_default="text, or else messages"),
    ] = None,
    examples: Annotated[int, typer.Option(help="How many, chosen at random.")] = 64,
    tokens: Annotated[int, typer.Option(help="Longer texts are cut after so many.")] = 128,
    steps: Annotated[int, typer.Option(help="Of learned.")] = 100,
    axes: Annotated[
        list[str] | None,
        typer.Option(
            help="Match these axes alone; * stands for any characters, and the option may be repeated. A name "
            "that fits none has them listed.",
            show_default="all",
        ),
    ] = None,
    residual: Annotated[
        Residual,
        typer.Option(
            help="What may happen to the residual stream: the largest group that leaves norms as they "
            "are (signed permutations with RMSNorm, permutations with LayerNorm), nothing, or one of "
            "these."
        ),
    ] = Residual.AUTO,
    seed: Annotated[int, typer.Option(help="Decides the order in which axes are visited.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="The number format of the output; B's own by default.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an alignment that was interrupted.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier output of Isthmus.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Move a model along its symmetries next to another one; it computes the same as before.

    Units, heads and coordinates of a network can change places, and some can be scaled or turned, without
    any change of what it computes. Two networks that were trained apart differ by such a change, and merge
    badly until it is undone. Fine-tunes of one base need no alignment.

    B is matched to A, run before and after on random inputs in float64, and written only if its outputs are
    the same. Its MLPs may be narrower than A's: they grow by units that do nothing. The same in a recipe: `align: weights`, or `align: {by: activations, data: texts.jsonl}`.

    \b
    Examples:
        isthmus align ./model-a ./model-b -o model-b-aligned
        isthmus align ./model-a ./model-b -o model-b-aligned --match activations --data texts.jsonl
        isthmus align ./model-a ./model-b -o model-b-aligned --axes 'mlp.*'
    """  # noqa: D301
    from isthmus import api
    from isthmus.cli.progress import terminal_progress

    listen_to_kill()
    try:
        outcome = api.align(
            reference,
            moved,
            out,
            by=match.value,
            data=data,
            column=column,
            examples=examples,
            tokens=tokens,
            steps=steps,
            axes=axes,
            residual=residual.value,
            seed=seed,
            dtype=dtype,
            resume=resume,
            overwrite=overwrite,
            progress=terminal_progress(),
        )
    except KeyboardInterrupt:
        typer.echo("stopped; --resume goes on", err=True)
        raise typer.Exit(130) from None
    if as_json:
        content = {"out": str(outcome.out), "notes": list(outcome.notes)}
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
        return
    for note in outcome.notes:
        typer.echo(printable(note))
    typer.echo(f"{out}: {printable(moved)} in the coordinates of {printable(reference)}")
