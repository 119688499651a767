"""`isthmus merge RECIPE OUT`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.interrupts import listen_to_kill
from isthmus.cli.text import count, printable

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
    every_tensor: Annotated[
        bool, typer.Option("--all", help="With --dry-run: every tensor, not every kind of module.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the plan or the outcome as JSON on stdout.")
    ] = False,
) -> None:
    """Merge the models, or the LoRA adapters, of a recipe.

    Models become a folder that transformers loads, adapters one that PEFT loads; with output: full
    in the recipe the merged adapter is added to base_model. Models that were trained apart are aligned
    first by align: weights; finish: {step: reset, data: pictures/} measures BatchNorm's statistics anew.

    Memory stays at a few chunks of the tensors in hand, whatever the size and number of models. A
    merge that was interrupted, even by kill -9, goes on with --resume and ends in the same bytes.

    \b
    Example recipe:
        merge_method: ties
        base_model: ./base
        models:
          - model: ./math
            parameters: {weight: 1.0, density: 0.2}
          - model: ./code
            parameters: {weight: 1.0, density: 0.2}
        dtype: bfloat16
    """  # noqa: D301
    if resume and overwrite:
        raise typer.BadParameter(
            "an interrupted merge either goes on or is replaced: choose one",
            param_hint="--resume, --overwrite",
        )
    # Read when numpy loads. Workers are the threads here; OpenBLAS's own would spin beside them.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from isthmus.api import check_output, plan, run_plan
    from isthmus.checkpoints import parse_size
    from isthmus.cli.plan_text import cost_lines
    from isthmus.cli.progress import terminal_progress
    from isthmus.engine.run import default_workers

    threads = default_workers() if workers is None else workers
    with plan(
        recipe,
        device=device,
        max_shard_size=parse_size(max_shard_size),
        allow_nonfinite=allow_nonfinite,
    ) as made:
        if dry_run:
            check_output(made, out, resume=resume, overwrite=overwrite)
            _print_plan(made, threads, as_json, every_tensor)
            return
        if not as_json:
            for line in cost_lines(made, threads):
                typer.echo(line, err=True)
        listen_to_kill()
        try:
            outcome = run_plan(
                made,
                out,
                workers=threads,
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


def _print_plan(made: Plan, workers: int, as_json: bool, every_tensor: bool) -> None:
    from isthmus.cli.plan_text import plan_lines
    from isthmus.engine.describe import plan_as_data

    if as_json:
        _print_json(plan_as_data(made, workers))
        return
    for line in plan_lines(made, workers, every_tensor=every_tensor):
        typer.echo(line)
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
        typer.echo(f"note: {printable(note)}", err=True)
    done = f"{count(outcome.merged, 'tensor')} merged, {outcome.carried:,} copied"
    if outcome.resumed == outcome.merged + outcome.carried:
        done += "; complete already, nothing to do"
    elif outcome.resumed:
        done += f"; {outcome.resumed:,} of them by an earlier run"
    typer.echo(f"{outcome.out}: {done}")


def _print_json(data: dict[str, Any]) -> None:
    import json

    typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
