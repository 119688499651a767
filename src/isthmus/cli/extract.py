"""`isthmus extract TUNED --base BASE -o OUT`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.interrupts import listen_to_kill
from isthmus.cli.text import count, printable, room, table

if TYPE_CHECKING:
    from isthmus.engine.extraction import Extraction, TensorChange

SHOWN = 10
"""Rows of a table unless --all is given."""


def command(
    tuned: Annotated[str, typer.Argument(help="The fine-tune: a folder, a file, or a Hub id.")],
    base: Annotated[str, typer.Option(help="The model that it was trained from.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The adapter's folder; must be new, empty or ours.")
    ],
    rank: Annotated[
        int | None,
        typer.Option(min=1, help="The rank in every module; 32 unless --energy is given."),
    ] = None,
    energy: Annotated[
        float | None,
        typer.Option(
            help="Instead: the share of the squared norm of each module's change to keep, such as "
            "0.9. Each module gets the smallest rank that does."
        ),
    ] = None,
    min_rank: Annotated[
        int | None, typer.Option(min=1, help="With --energy: the smallest rank.")
    ] = None,
    max_rank: Annotated[
        int | None, typer.Option(min=1, help="With --energy: the largest rank.")
    ] = None,
    modules: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Modules for LoRA: those in whose name this is found, embeddings and convolutions "
            "too. By default all linear layers but the output embedding.",
        ),
    ] = None,
    save: Annotated[
        str | None,
        typer.Option(
            metavar="REGEX",
            help="Other tensors to keep: the modules of those that changed and in whose name this "
            "is found are stored in full, such as 'norm|bias|classifier'.",
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="The format of the factors: float32, bfloat16, float16.")
    ] = "float32",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier output of Isthmus.")
    ] = False,
    every_module: Annotated[
        bool, typer.Option("--all", help="Print every module and tensor, not the ten worst.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
) -> None:
    """Turn a full fine-tune into a LoRA adapter of its base, which PEFT loads.

    The update of each module is the truncated singular value decomposition of its change, the
    nearest matrix of its rank. What no LoRA can hold (norms, biases, embeddings, new heads) is
    reported, and stored in full where --save asks for it.

    \b
    Examples:
        isthmus extract ./tuned --base ./base -o adapter --rank 16
        isthmus extract ./tuned --base ./base -o adapter --energy 0.9 --max-rank 128 --save norm
    """  # noqa: D301
    # Read when numpy loads: the threads of OpenBLAS, of which one works, would spin beside it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from isthmus import api
    from isthmus.cli.progress import terminal_progress

    listen_to_kill()
    try:
        done = api.extract(
            tuned,
            base,
            out,
            rank=rank,
            energy=energy,
            min_rank=min_rank,
            max_rank=max_rank,
            modules=modules,
            save=save,
            dtype=dtype,
            overwrite=overwrite,
            progress=terminal_progress(),
        )
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was written", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(_as_data(done), indent=2, ensure_ascii=False))
    else:
        _print(done, every_module)


def _print(done: Extraction, every_module: bool) -> None:
    limit = None if every_module else SHOWN
    for note in done.notes:
        typer.echo(f"note: {printable(note)}", err=True)
    worst = sorted(done.modules, key=lambda module: module.kept)[:limit]
    rows = [["module", "shape", "moved", "rank", "kept"]]
    rows += [
        [m.module, f"{m.shape[0]}x{m.shape[1]}", f"{m.change:.2%}", str(m.rank), f"{m.kept:.2%}"]
        for m in worst
    ]
    _print_table(rows, {0}, len(done.modules) - len(worst))
    tensors = [(t, "saved") for t in done.saved] + [(t, "left out") for t in done.left_out]
    tensors.sort(key=lambda entry: -_moved(entry[0]))
    if tensors:
        typer.echo()
        rows = [["tensor without LoRA", "moved", ""]]
        rows += [[t.name, _percent(t), what] for t, what in tensors[:limit]]
        _print_table(rows, {0, 2}, len(tensors[limit or len(tensors) :]))
    ranks = [module.rank for module in done.modules]
    typer.echo(
        f"{done.out}: {count(len(ranks), 'module')}, ranks {min(ranks)} to {max(ranks)}; "
        f"{done.kept:.2%} of the squared norm of their change, {done.kept_of_everything:.2%} of "
        "that of all tensors"
    )


def _print_table(rows: list[list[str]], left: set[int], hidden: int) -> None:
    for line in table(rows, left=left, width=room()):
        typer.echo(line)
    if hidden:
        typer.echo(f"and {hidden} more; --all prints them")


def _moved(tensor: TensorChange) -> float:
    return float("inf") if tensor.change is None else tensor.change


def _percent(tensor: TensorChange) -> str:
    return "new" if tensor.change is None else f"{tensor.change:.2%}"


def _as_data(done: Extraction) -> dict[str, Any]:
    from dataclasses import asdict
    from math import isfinite

    def tensors(changes: tuple[TensorChange, ...]) -> list[dict[str, Any]]:
        return [{"name": c.name, "change": _finite(c.change)} for c in changes]

    def _finite(value: float | None) -> float | None:
        return value if value is not None and isfinite(value) else None

    return {
        "out": str(done.out),
        "kept": done.kept,
        "kept_of_everything": done.kept_of_everything,
        "modules": [asdict(m) | {"change": _finite(m.change)} for m in done.modules],
        "saved": tensors(done.saved),
        "left_out": tensors(done.left_out),
        "unchanged": done.unchanged,
        "notes": list(done.notes),
    }
