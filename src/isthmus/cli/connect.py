"""`isthmus connect A B --data FILE -o REPORT`."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli.align import Residual
from isthmus.cli.interrupts import listen_to_kill
from isthmus.cli.text import printable, room, table

if TYPE_CHECKING:
    from isthmus.models.connection import Connection


class Shape(Enum):
    """Of a path."""

    LINEAR = "linear"
    POLYCHAIN = "polychain"
    BEZIER = "bezier"


class AlignBy(Enum):
    """How the second model is moved next to the first."""

    NONE = "none"
    WEIGHTS = "weights"
    ACTIVATIONS = "activations"
    LEARNED = "learned"


def command(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A causal language model's folder or Hub id.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Another of the same architecture.")],
    data: Annotated[
        Path,
        typer.Option(help="Texts, as `isthmus calibrate` takes them; every other one is held out."),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Folder for results.json and report.html.")
    ],
    path: Annotated[
        Shape,
        typer.Option(help="The straight line alone, or also a path whose bends are trained."),
    ] = Shape.LINEAR,
    align: Annotated[
        AlignBy,
        typer.Option(
            help="Move B along its symmetries next to A first: by its weights, by what its units answer "
            "to the data, or by the loss on the way."
        ),
    ] = AlignBy.WEIGHTS,
    residual: Annotated[
        Residual, typer.Option(help="What may happen to the residual stream; see `isthmus align`.")
    ] = Residual.AUTO,
    bends: Annotated[int, typer.Option(help="Of a bent path.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Of training the bends.")] = 200,
    rate: Annotated[float, typer.Option(help="The learning rate for that.")] = 1e-3,
    points: Annotated[int, typer.Option(min=3, help="Of the grid from t = 0 to 1.")] = 25,
    column: Annotated[str | None, typer.Option(help="The column of the texts.")] = None,
    examples: Annotated[
        int, typer.Option(min=2, help="Texts to choose, half of them held out.")
    ] = 256,
    tokens: Annotated[int, typer.Option(min=2, help="Longer texts are cut after so many.")] = 128,
    plane: Annotated[
        int, typer.Option(min=0, help="Points along each side of a landscape through the bend.")
    ] = 0,
    curvature: Annotated[
        bool,
        typer.Option("--curvature", help="The Hessian's top eigenvalue and trace at t=0, ½, 1."),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of choices, orders and batches.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a training that was interrupted.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier report.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Say whether two models are joined by a path of low loss, and what happens along it.

    The barrier is how far the loss rises above the line between the ends. If it is low on the straight
    line, the models can be averaged; if it is low on a bent path only, they lie in one valley that is not
    straight. Half of the texts align and train, all figures are of the other half.

    \b
    Examples:
        isthmus connect ./model-a ./model-b --data texts.jsonl -o report
        isthmus connect ./model-a ./model-b --data texts.jsonl --path polychain --plane 11 -o report
    """  # noqa: D301
    from isthmus import api
    from isthmus.cli.progress import terminal_progress

    listen_to_kill()
    try:
        found = api.connect(
            a,
            b,
            data,
            out,
            path=path.value,
            align=align.value,
            residual=residual.value,
            bends=bends,
            steps=steps,
            rate=rate,
            points=points,
            column=column,
            examples=examples,
            tokens=tokens,
            plane=plane,
            curvature=curvature,
            seed=seed,
            resume=resume,
            overwrite=overwrite,
            progress=terminal_progress(),
        )
    except KeyboardInterrupt:
        typer.echo("stopped; --resume goes on", err=True)
        raise typer.Exit(130) from None
    if as_json:
        from isthmus.reports.connection import connection_data

        typer.echo(json.dumps(connection_data(found, a, b), indent=2, ensure_ascii=False))
        return
    _print(found)
    typer.echo(f"The report is {printable(str(out / 'report.html'))}")


def _print(found: Connection) -> None:
    rows = [["path", "loss of A", "loss of B", "highest", "barrier (a)", "barrier (b)", "at t"]]
    for walk in found.walks:
        losses = walk.profile.values["loss"]
        figures = (losses[0], losses[-1], max(losses), walk.a.value, walk.b.value)
        rows.append([walk.name, *(f"{value:.4f}" for value in figures), f"{walk.b.at:.2f}"])
    for line in table(rows, left={0}, width=room()):
        typer.echo(line)
    typer.echo(
        f"relative distance {found.before:.3f}, after alignment {found.distance:.3f}; "
        f"{found.held_out} examples held out, {found.training} to align and train"
    )
    for t, (top, trace) in found.curvature.items():
        typer.echo(f"t = {t:g}: top eigenvalue of the Hessian {top:.4g}, trace {trace:.4g}")
    typer.echo(found.verdict)
