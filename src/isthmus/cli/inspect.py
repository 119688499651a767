"""`isthmus inspect MODEL...`."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.text import count, printable, room, table

if TYPE_CHECKING:
    from isthmus.checkpoints import Checkpoint
    from isthmus.engine.comparison import Comparison, ModuleGeometry


def command(
    models: Annotated[
        list[str],
        typer.Argument(help="Folders, files, Hub ids or base+adapter; the first is the base."),
    ],
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            help="Statistics of an expert, from isthmus calibrate; once for each expert, in order."
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write the diagnosis on calibration inputs as HTML, with a figure."),
    ] = None,
    noise: Annotated[
        bool, typer.Option("--noise", help="Measure the noise of one model's gradients on --data.")
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|FOLDER|NAME",
            help="For --noise: texts as isthmus calibrate takes them, with labels for a classifier; "
            "for images a folder of folders by class, an idx file, or a name such as mnist.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Examples of a micro-batch.")] = 4,
    examples: Annotated[int, typer.Option(min=1, help="Examples to choose at random.")] = 256,
    tokens: Annotated[int, typer.Option(min=2, help="Longer texts are cut after so many.")] = 256,
    column: Annotated[
        str | None,
        typer.Option(help="The column of the texts; by default text, or else messages."),
    ] = None,
    label_column: Annotated[
        str | None,
        typer.Option(help="The column of the classes; by default label, or else labels."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Another seed, another choice of examples.")] = 0,
    sign: Annotated[
        bool, typer.Option("--sign", help="Also the noise scale for Lion and Signum.")
    ] = False,
    spectral: Annotated[
        bool, typer.Option("--spectral", help="Also the noise scale for Muon.")
    ] = False,
    training: Annotated[
        Path | None,
        typer.Option(
            help="How the model was trained: trainer_state.json, training arguments as JSON or YAML, or "
            "their folder. Adds the effective noise scale."
        ),
    ] = None,
    cache: Annotated[
        Path, typer.Option(help="Where `make data` put its data, for names such as mnist.")
    ] = Path(".cache"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    all_modules: Annotated[
        bool, typer.Option("--all", help="Print every module or layer, not ten of them.")
    ] = False,
) -> None:
    """Say what a model is; with several, whether they can be merged and why not.

    With several models the first is taken as the base: for every kind of module you see how far
    each of the others moved from it (relative distance) and the cosines between these moves. Near
    0 the experts changed different things; towards 1 they learned the same; below 0 they disagree.

    With calibration statistics of the experts you also see, for every linear layer and in all, how
    much of the experts' outputs each merge can keep, which one to take, and which layers hurt.

    With --noise you see how noisy one model's gradients are on your data: the batch size at which noise
    equals signal, and with --training what that came to in its training.

    Exits with 1 when the models cannot be merged whole.

    \b
    Examples:
        isthmus inspect ./base ./math ./code --calibration math.stats --calibration code.stats
        isthmus inspect ./math --noise --data problems.jsonl --training ./math/trainer_state.json
    """  # noqa: D301
    from isthmus.checkpoints import open_checkpoint
    from isthmus.cli.progress import terminal_progress
    from isthmus.engine.comparison import compare
    from isthmus.errors import CalibrationError

    if noise or data is not None or training is not None or sign or spectral:
        from isthmus.cli import inspect_noise
        from isthmus.models.noise_data import NoiseData

        path = inspect_noise.required(models, noise, data, calibration, report)
        given = NoiseData(path, batch, examples, tokens, column, label_column, seed)
        inspect_noise.run(
            models[0],
            given,
            cache=cache,
            training=training,
            sign=sign,
            spectral=spectral,
            most=None if all_modules else 10,
            as_json=as_json,
        )
        return
    stored = None
    if calibration:
        from isthmus.cli import inspect_calibration

        stored = inspect_calibration.opened(calibration, models, report)
    elif report is not None:
        raise CalibrationError(
            "--report is of the diagnosis on calibration inputs, and there are none",
            "Give --calibration once for each expert; isthmus calibrate makes the statistics.",
        )
    with ExitStack() as stack:
        opened = [stack.enter_context(open_checkpoint(model)) for model in models]
        summaries = [_summary(model) for model in opened]
        if len(opened) == 1:
            _print_summaries(summaries, as_json)
            return
        differing = [_tokens(opened[0], other) for other in opened[1:]]
        comparison = compare(opened, terminal_progress())
        diagnosis = None
        if stored is not None:
            diagnosis = inspect_calibration.diagnose(opened, stored, comparison.matching)
            if report is not None:
                inspect_calibration.write_report(report, opened, *diagnosis)
    most = None if all_modules else 10
    if as_json:
        content = {"models": summaries, "comparison": _as_data(comparison, differing)}
        if diagnosis is not None:
            content["diagnosis"] = inspect_calibration.as_data(*diagnosis)
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
    else:
        _print_summaries(summaries, as_json=False)
        _print_comparison(comparison, differing, most)
        if diagnosis is not None:
            inspect_calibration.print_diagnosis(*diagnosis, most)
            if report is not None:
                typer.echo(f"\nThe report is {report}")
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
        "architectures": _words(config.get("architectures")),
        "model_type": next(iter(_words(config.get("model_type"))), None),
        "parameters": sum(i.numel for i in model.tensors.values() if i.dtype.is_float),
        "tensors": len(model.tensors),
        "bytes": sum(info.nbytes for info in model.tensors.values()),
        "elements_by_dtype": dict(formats),
        "files": [source.path.name for source in model.sources],
        "tied": dict(model.tied),
        "notes": list(model.notes),
    }


def _words(value: Any) -> list[str]:
    """What a config says, in whatever form: files come from anywhere."""
    return [str(part) for part in (value if isinstance(value, list) else [value]) if part]


def _print_summaries(summaries: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"models": summaries}, indent=2, ensure_ascii=False))
        return
    for summary in summaries:
        kind = ", ".join(summary["architectures"]) or summary["model_type"] or "no config"
        formats = ", ".join(summary["elements_by_dtype"])
        typer.echo(
            f"{printable(summary['model'])}\n  {printable(kind)}; "
            f"{count(summary['parameters'], 'parameter')} in "
            f"{count(summary['tensors'], 'tensor')}, {formats}; "
            f"{count(summary['bytes'], 'byte')} in {count(len(summary['files']), 'file')}"
        )
        for name, kept in summary["tied"].items():
            typer.echo(printable(f"  tied: {name} is {kept}"))
        for note in summary["notes"]:
            typer.echo(printable(f"  note: {note}"))


def _tokens(base: Checkpoint, other: Checkpoint) -> int | None:
    from isthmus.checkpoints.vocabulary import differing_tokens

    return differing_tokens(base, other)


def _print_comparison(comparison: Comparison, tokens: list[int | None], most: int | None) -> None:
    from isthmus.engine.compatibility import obstacles

    found = list(obstacles(comparison.matching, "the base"))
    if found:
        typer.echo("\nThey cannot be merged whole:")
    elif comparison.far:
        typer.echo("\nBy names and shapes these models can be merged.")
    else:
        typer.echo("\nThese models can be merged.")
    for text in found[:10]:
        typer.echo(printable(f"  - {text}"))
    if len(found) > 10:
        typer.echo(f"  - and {len(found) - 10} more")
    if found and comparison.matching.matched:
        typer.echo("  tensors: common in a recipe merges what they share.")
    for number in comparison.far:
        typer.echo(
            f"warning: model {number + 1} is farther from the base than the base is from zero: "
            "probably not a fine-tune of it, and merging will likely fail"
        )
    for label, tokens_of in zip(comparison.labels, tokens, strict=True):
        if tokens_of:
            typer.echo(
                f"warning: {count(tokens_of, 'token')} with other ids in {printable(label)} than "
                "in the base"
            )
    if comparison.total is not None:
        _print_distances(comparison, comparison.total, most)


def _print_distances(comparison: Comparison, total: ModuleGeometry, most: int | None) -> None:
    typer.echo("\nRelative distance from the base, and cosines between task vectors:")
    for number, label in enumerate(comparison.labels, start=1):
        typer.echo(f"  {number}: {printable(label)}")
    typer.echo()
    pairs = _pairs(len(comparison.labels))
    moved = sorted(comparison.modules.items(), key=lambda item: -_farthest(item[1]))
    rows = [
        [
            "module",
            "parameters",
            *(str(number + 1) for number in range(len(comparison.labels))),
            *(f"cos {i + 1},{j + 1}" for i, j in pairs),
        ],
        ["everything", *_cells(total, pairs)],
        *([name, *_cells(module, pairs)] for name, module in moved[:most]),
    ]
    for line in table(rows, left=(0,), width=room(), sections=2):
        typer.echo(line)
    if any("–" in row for row in rows):
        typer.echo("–: not to be had, a vector is zero or too long for float64.")
    if most is not None and len(moved) > most:
        typer.echo(f"{count(len(moved) - most, 'more module')} (--all)")


def _farthest(module: ModuleGeometry) -> float:
    """The largest distance, infinite where the base is zero and something moved."""
    return max((float(d) for d in module.distances if d == d), default=0.0)


def _pairs(count: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(count) for j in range(i + 1, count)]


def _cells(module: ModuleGeometry, pairs: list[tuple[int, int]]) -> list[str]:
    def number(value: float, form: str) -> str:
        return "–" if _finite(value) is None else format(value, form)

    return [
        f"{module.parameters:,}",
        *(number(distance, ".4f") for distance in module.distances),
        *(number(module.cosines[pair], "+.3f") for pair in pairs),
    ]


def _as_data(comparison: Comparison, tokens: list[int | None]) -> dict[str, Any]:
    from isthmus.engine.compatibility import obstacles

    def geometry(module: ModuleGeometry) -> dict[str, Any]:
        return {
            "parameters": module.parameters,
            "base_norm": _finite(module.base_norm),
            "relative_distances": [_finite(d) for d in module.distances.tolist()],
            "cosines": [[_finite(c) for c in row] for row in module.cosines.tolist()],
        }

    return {
        "experts": list(comparison.labels),
        "mergeable": comparison.matching.is_complete,
        "obstacles": list(obstacles(comparison.matching, "the base")),
        "related": _related(comparison),
        "unrelated": [comparison.labels[number] for number in comparison.far],
        "differing_tokens": tokens,
        "modules": {name: geometry(module) for name, module in comparison.modules.items()},
        "total": None if comparison.total is None else geometry(comparison.total),
    }


def _related(comparison: Comparison) -> bool | None:
    """Whether all models may be fine-tunes of the base; None where that could not be measured."""
    if comparison.far:
        return False
    distances = [] if comparison.total is None else comparison.total.distances.tolist()
    return True if distances and all(distance == distance for distance in distances) else None


def _finite(number: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return number if abs(number) < float("inf") else None
