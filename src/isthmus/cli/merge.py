"""`isthmus merge RECIPE OUT`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from isthmus.engine.plan import Plan
    from isthmus.engine.run import Outcome


def command(
    recipe: Annotated[Path, typer.Argument(help="The YAML file that describes the merge.")],
    out: Annotated[Path, typer.Argument(help="The output folder; must be new, empty or ours.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and print the plan; write nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted merge.")
    ] = False,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace an earlier merge of Isthmus; it stays until the new one is complete.",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="Where to compute: cpu, cuda, cuda:1, mps.")] = "cpu",
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Threads; by default one a processor. Never changes the result."),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Bytes of the largest weight file: 5GB, 500MiB, 1000000.")
    ] = "5GB",
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Let NaN and infinity in the inputs pass.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan or the outcome as JSON on stdout.")
    ] = False,
) -> None:
    """Merge the models of a recipe into a folder that transformers loads.

    Memory stays at a few chunks of the tensors in hand, whatever the size and number of models. A
    merge that was interrupted, even by kill -9, goes on with --resume and ends in the same bytes.

    Example recipe:

        merge_method: ties
        base_model: ./base
        models:
          - model: ./math
            parameters: {weight: 1.0, density: 0.2}
          - model: ./code
            parameters: {weight: 1.0, density: 0.2}
        dtype: bfloat16
    """
    from isthmus.api import plan, run_plan
    from isthmus.checkpoints import parse_size
    from isthmus.cli.progress import terminal_progress
    from isthmus.engine.run import default_workers

    count = default_workers() if workers is None else workers
    with plan(
        recipe,
        device=device,
        max_shard_size=parse_size(max_shard_size),
        allow_nonfinite=allow_nonfinite,
    ) as made:
        if dry_run:
            _print_plan(made, count, as_json)
            return
        if not as_json:
            for line in _plan_lines(made, count):
                typer.echo(line, err=True)
        # A polite kill is a Ctrl-C: stop between chunks and leave a resumable state.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            outcome = run_plan(
                made,
                out,
                workers=count,
                resume=resume,
                overwrite=overwrite,
                progress=terminal_progress(),
            )
        except KeyboardInterrupt:
            typer.echo(
                f"stopped. Go on with: isthmus merge {recipe} {out} --resume (and the same options)",
                err=True,
            )
            raise typer.Exit(130) from None
        _print_outcome(outcome, as_json)


def _plan_lines(made: Plan, workers: int) -> list[str]:
    from rich.filesize import decimal

    return [
        f"{made.method.name}: {len(made.recipe.experts)} models"
        + ("" if made.recipe.base_model is None else f" on {made.recipe.base_model}"),
        f"{len(made.tasks)} tensors; inputs {decimal(made.bytes_to_read)}, read {made.readings}; "
        f"output {decimal(made.bytes_to_write)} in {len(made.layout.shards)} file(s); "
        f"buffers {decimal(made.peak_memory(workers))} for {workers} worker(s)",
    ]


def _print_plan(made: Plan, workers: int, as_json: bool) -> None:
    from isthmus.engine.describe import plan_as_data

    if as_json:
        _print_json(plan_as_data(made, workers))
        return
    for line in _plan_lines(made, workers):
        typer.echo(line)
    from isthmus.engine.plan import MergeTask

    for task in made.tasks:
        what = (
            made.method.name
            if isinstance(task, MergeTask)
            else f"from {made.donor.label}: {task.reason}"
        )
        shape = "x".join(map(str, task.output.shape)) or "scalar"
        typer.echo(f"  {task.output.name}  {task.output.dtype.value} {shape}  {what}")
    for note in made.notes:
        typer.echo(f"note: {note}")
    typer.echo("dry run: nothing was written")


def _print_outcome(outcome: Outcome, as_json: bool) -> None:
    if as_json:
        _print_json(
            {
                "out": str(outcome.out),
                "merged": outcome.merged,
                "carried": outcome.carried,
                "resumed": outcome.resumed,
                "notes": list(outcome.notes),
            }
        )
        return
    for note in outcome.notes:
        typer.echo(f"note: {note}", err=True)
    kept = f", {outcome.resumed} of them by an earlier run" if outcome.resumed else ""
    typer.echo(
        f"{outcome.out}: {outcome.merged} tensors merged, {outcome.carried} taken over{kept}"
    )


def _print_json(data: dict[str, Any]) -> None:
    import json

    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
