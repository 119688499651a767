"""What `isthmus inspect --calibration` adds: the diagnosis on calibration inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from isthmus.cli.text import count, printable, room, table

if TYPE_CHECKING:
    from isthmus.checkpoints import Checkpoint
    from isthmus.engine.matching import Matching
    from isthmus.models.diagnosis import NetworkDiagnosis
    from isthmus.models.store import StoredMoments
    from isthmus.projection.diagnosis import LayerDiagnosis
    from isthmus.projection.recommendation import Recommendation


def opened(
    folders: Sequence[Path], models: Sequence[str], report: Path | None
) -> list[StoredMoments]:
    """The statistics, refused before anything is measured if they cannot be used.

    Args:
        folders: Of statistics, one for each expert.
        models: The base and the experts.
        report: Where the HTML report goes, if anywhere.

    Raises:
        CalibrationError: Too few or too many, or no statistics.
        OutputError: The report's folder is missing.
    """
    from isthmus.errors import CalibrationError, OutputError
    from isthmus.models.store import StoredMoments

    if len(folders) != len(models) - 1:
        raise CalibrationError(
            f"{count(len(folders), 'set')} of calibration statistics for "
            f"{count(len(models) - 1, 'expert')}",
            "Name the base first, then the experts, and give --calibration once for each expert, in "
            "their order.",
        )
    if report is not None and not report.absolute().parent.is_dir():
        raise OutputError(
            f"{report} cannot be written: there is no folder {report.absolute().parent}",
            "Make it, or choose another one.",
        )
    return [StoredMoments(folder) for folder in folders]


def diagnose(
    models: Sequence[Checkpoint], stored: Sequence[StoredMoments], matching: Matching
) -> tuple[NetworkDiagnosis, Recommendation]:
    """Judge the merges of every layer, with a bar.

    Raises:
        IsthmusError: As `isthmus.models.diagnosis.diagnose`.
    """
    from isthmus.cli.progress import terminal_progress
    from isthmus.models import diagnosis
    from isthmus.projection.recommendation import recommend

    progress = terminal_progress()
    begun = False

    def report(_done: int, total: int) -> None:
        nonlocal begun
        if not begun:
            progress.begin("diagnosing layers", total, counts=True)
            begun = True
        progress.advance(1)

    names = {matched.info.name: matched.names[1:] for matched in matching.matched}
    try:
        found = diagnosis.diagnose(models[0], models[1:], stored, names, report)
    finally:
        if begun:
            progress.finish()
    return found, recommend(found.layers)


def write_report(
    path: Path, models: Sequence[Checkpoint], found: NetworkDiagnosis, advice: Recommendation
) -> None:
    """Write the HTML report, replacing what is there.

    Raises:
        OutputError: It cannot be written.
    """
    from isthmus.checkpoints import atomic_write_text
    from isthmus.reports.diagnosis import diagnosis_report

    labels = [model.label for model in models]
    atomic_write_text(path, diagnosis_report(labels, found.layers, found.left_out, advice))


def print_diagnosis(found: NetworkDiagnosis, advice: Recommendation, most: int | None) -> None:
    """Tables for a terminal, and the recommendation.

    Args:
        found: The diagnosis.
        advice: What follows from it.
        most: So many layers at most; all if None.
    """
    typer.echo(
        "\nOn the calibration inputs, in % of J(0), the base's squared error over all layers:\n"
    )
    if advice.choices:
        _print_table(_merges(advice))
    if advice.choices and advice.total.ranks:
        typer.echo("\nThe best weights of a rank in every layer, and what no such rank exceeds:\n")
        _print_table(_ranks(advice.total))
    typer.echo("\nCaptured energy by layer in %, and the layer's part in what is left:\n")
    names = list(advice.hurting) or list(found.layers)
    rows = [["weight", "of what is left", *_COLUMNS, "best heuristic"]]
    rows += [_layer(name, found.layers[name], advice) for name in names[:most]]
    for line in table(rows, left=(0, len(rows[0]) - 1), width=room()):
        typer.echo(line)
    if any("–" in row for row in rows):
        typer.echo("–: not to be had; a basis of more than 2,048 coefficients is not computed.")
    if most is not None and len(names) > most:
        typer.echo(f"{count(len(names) - most, 'more layer')} (--all)")
    typer.echo("")
    for sentence in advice.sentences:
        typer.echo(printable(sentence))
    for name, reason in found.left_out.items():
        typer.echo(printable(f"{name} is not judged: {reason}."))


_COLUMNS = ("scalar", "diagonal", "columns", "optimal")


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    for line in table(rows, left=(0,), width=room()):
        typer.echo(line)


def _merges(advice: Recommendation) -> list[list[str]]:
    rows = [["merge", "left", "captured", "left on new inputs"]]
    for choice in advice.choices:
        numbers = (choice.left, choice.captured, choice.expected)
        rows.append([choice.name, *(_percent(number) for number in numbers)])
    return rows


def _ranks(total: LayerDiagnosis) -> list[list[str]]:
    def share(values: Mapping[int, float], rank: int) -> str:
        return _percent(1 - values[rank] / total.initial)

    rows = [
        [str(rank), share(total.ranks, rank), share(total.bounds, rank)] for rank in total.ranks
    ]
    return [["rank", "captured", "bound"], *rows]


def _layer(name: str, layer: LayerDiagnosis, advice: Recommendation) -> list[str]:
    best, least = layer.best_heuristic
    return [
        name,
        _percent(advice.hurting.get(name)),
        *(_percent(_captured(layer, basis)) for basis in _COLUMNS),
        f"{_percent(layer.captured(least))} {best}",
    ]


def _captured(layer: LayerDiagnosis, basis: str) -> float | None:
    value = layer.projections.get(basis)
    return None if value is None else layer.captured(value)


def _percent(share: float | None) -> str:
    if share is None or _finite(share) is None:
        return "–"
    return f"{100 * share:.1f}"


def as_data(found: NetworkDiagnosis, advice: Recommendation) -> dict[str, Any]:
    """The same for JSON, which has no infinity."""
    return {
        "recommendation": {
            "merge": None if advice.chosen is None else advice.chosen.name,
            "recipe": None if advice.chosen is None else advice.chosen.recipe,
            "sentences": list(advice.sentences),
        },
        "merges": {
            choice.name: {
                "calibrated": choice.calibrated,
                "left": choice.left,
                "captured": choice.captured,
                "left_on_new_inputs": _finite(choice.expected),
                "recipe": choice.recipe,
            }
            for choice in advice.choices
        },
        "total": _values(advice.total),
        "layers": {
            name: {
                **_values(layer),
                "share_of_what_is_left": advice.hurting.get(name),
                "inputs": layer.inputs,
                "unchanged_experts": [k + 1 for k in layer.unchanged],
                "silent_experts": [k + 1 for k in layer.silent],
                "undetermined": list(layer.notes),
            }
            for name, layer in found.layers.items()
        },
        "left_out": dict(found.left_out),
    }


def _values(layer: LayerDiagnosis) -> dict[str, Any]:
    values = {**layer.projections, **layer.heuristics}
    return {
        "initial": layer.initial,
        "values": values,
        "captured": {name: _finite(layer.captured(value)) for name, value in values.items()},
        "task_arithmetic": {f"{scale:g}": value for scale, value in layer.scales.items()},
        "ranks": {str(rank): value for rank, value in layer.ranks.items()},
        "bounds": {str(rank): value for rank, value in layer.bounds.items()},
    }


def _finite(number: float) -> float | None:
    return number if abs(number) < float("inf") else None
