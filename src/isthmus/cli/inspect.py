"""`isthmus inspect MODEL...`."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from isthmus.checkpoints import Checkpoint
    from isthmus.engine.comparison import Comparison, ModuleGeometry


def command(
    models: Annotated[
        list[str],
        typer.Argument(help="Folders, files, Hub ids or base+adapter; the first is the base."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    all_modules: Annotated[
        bool, typer.Option("--all", help="Print every module, not the ten that moved most.")
    ] = False,
) -> None:
    """Say what a model is; with several, whether they can be merged and why not.

    With several models the first is taken as the base: for every kind of module you see how far
    each of the others moved from it (relative distance) and the cosines between these moves. Near
    0 the experts changed different things; towards 1 they learned the same; below 0 they disagree.

    Exits with 1 when the models cannot be merged whole.
    """
    from isthmus.checkpoints import open_checkpoint
    from isthmus.cli.progress import terminal_progress
    from isthmus.engine.comparison import compare

    with ExitStack() as stack:
        opened = [stack.enter_context(open_checkpoint(model)) for model in models]
        summaries = [_summary(model) for model in opened]
        if len(opened) == 1:
            _print_summaries(summaries, as_json)
            return
        tokens = [_tokens(opened[0], other) for other in opened[1:]]
        comparison = compare(opened, terminal_progress())
    if as_json:
        data = {"models": summaries, "comparison": _as_data(comparison, tokens)}
        typer.echo(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        _print_summaries(summaries, as_json=False)
        _print_comparison(comparison, tokens, None if all_modules else 10)
    if not comparison.matching.is_complete:
        raise typer.Exit(1)


def _summary(model: Checkpoint) -> dict[str, Any]:
    config = model.config or {}
    formats: Counter[str] = Counter()
    for info in model.tensors.values():
        formats[info.dtype.torch_name] += info.numel
    return {
        "model": model.label,
        "path": str(model.path),
        "architectures": config.get("architectures"),
        "model_type": config.get("model_type"),
        "parameters": sum(i.numel for i in model.tensors.values() if i.dtype.is_float),
        "tensors": len(model.tensors),
        "bytes": sum(info.nbytes for info in model.tensors.values()),
        "elements_by_dtype": dict(formats),
        "files": [source.path.name for source in model.sources],
        "tied": dict(model.tied),
        "notes": list(model.notes),
    }


def _print_summaries(summaries: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"models": summaries}, indent=2, ensure_ascii=False))
        return
    for summary in summaries:
        kind = ", ".join(summary["architectures"] or []) or summary["model_type"] or "no config"
        formats = ", ".join(summary["elements_by_dtype"])
        typer.echo(
            f"{summary['model']}\n  {kind}; {summary['parameters']:,} parameters in "
            f"{summary['tensors']} tensors, {formats}; {summary['bytes']:,} bytes in "
            f"{len(summary['files'])} file(s)"
        )
        for name, kept in summary["tied"].items():
            typer.echo(f"  tied: {name} is {kept}")
        for note in summary["notes"]:
            typer.echo(f"  note: {note}")


def _tokens(base: Checkpoint, other: Checkpoint) -> int | None:
    from isthmus.checkpoints.vocabulary import differing_tokens

    return differing_tokens(base, other)


def _print_comparison(comparison: Comparison, tokens: list[int | None], most: int | None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from isthmus.engine.compatibility import obstacles

    found = list(obstacles(comparison.matching, "the base"))
    typer.echo("\nThese models can be merged." if not found else "\nThey cannot be merged whole:")
    for text in found[:10]:
        typer.echo(f"  - {text}")
    if len(found) > 10:
        typer.echo(f"  - and {len(found) - 10} more")
    if found and comparison.matching.matched:
        typer.echo("  tensors: common in a recipe merges what they share.")
    for label, count in zip(comparison.labels, tokens, strict=True):
        if count:
            typer.echo(f"warning: {count:,} tokens have other ids in {label} than in the base")
    if comparison.total is None:
        return
    pairs = _pairs(len(comparison.labels))
    table = Table(title="relative distance from the base, and cosines between task vectors")
    table.add_column("module")
    table.add_column("parameters", justify="right")
    for number, label in enumerate(comparison.labels, start=1):
        table.add_column(f"{number}: {escape(label[-24:])}", justify="right")
    for i, j in pairs:
        table.add_column(f"cos {i + 1},{j + 1}", justify="right")
    moved = sorted(comparison.modules.items(), key=lambda item: -_farthest(item[1]))
    for name, module in moved[:most]:
        table.add_row(escape(name), *_cells(module, pairs))
    table.add_section()
    table.add_row("everything", *_cells(comparison.total, pairs))
    Console().print(table)
    if most is not None and len(moved) > most:
        typer.echo(f"{len(moved) - most} modules moved less; --all prints them.")


def _farthest(module: ModuleGeometry) -> float:
    """The largest distance, infinite where the base is zero and something moved."""
    return max((float(d) for d in module.distances if d == d), default=0.0)


def _pairs(count: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(count) for j in range(i + 1, count)]


def _cells(module: ModuleGeometry, pairs: list[tuple[int, int]]) -> list[str]:
    return [
        f"{module.parameters:,}",
        *(f"{distance:.4f}" for distance in module.distances),
        *(f"{module.cosines[pair]:+.3f}" for pair in pairs),
    ]


def _as_data(comparison: Comparison, tokens: list[int | None]) -> dict[str, Any]:
    from isthmus.engine.compatibility import obstacles

    def geometry(module: ModuleGeometry) -> dict[str, Any]:
        return {
            "parameters": module.parameters,
            "base_norm": module.base_norm,
            "relative_distances": [_finite(d) for d in module.distances.tolist()],
            "cosines": [[_finite(c) for c in row] for row in module.cosines.tolist()],
        }

    return {
        "experts": list(comparison.labels),
        "mergeable": comparison.matching.is_complete,
        "obstacles": list(obstacles(comparison.matching, "the base")),
        "differing_tokens": tokens,
        "modules": {name: geometry(module) for name, module in comparison.modules.items()},
        "total": None if comparison.total is None else geometry(comparison.total),
    }


def _finite(number: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if abs(number) < float("inf") else None
