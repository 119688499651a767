"""`isthmus advise TRAINING`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isthmus.cli.text import printable, room, table

if TYPE_CHECKING:
    from isthmus.lab.noise.advice import Advice
    from isthmus.lab.noise.evidence import Measured


class NetworkName(Enum):
    """What kind of network is trained."""

    TRANSFORMER = "transformer"
    CONVOLUTIONAL = "convolutional"
    MLP = "mlp"


class SplitName(Enum):
    """What the models to be merged have in common."""

    PRETRAINED = "pretrained"
    TRUNK = "trunk"
    START = "start"


class MethodName(Enum):
    """How they will be merged."""

    LINEAR = "linear"
    TASK_ARITHMETIC = "task_arithmetic"
    TIES = "ties"


def command(
    training: Annotated[
        Path,
        typer.Argument(help="YAML or JSON of a training, a trainer_state.json, or their folder."),
    ],
    network: Annotated[
        NetworkName | None, typer.Option(help="The kind of network; guessed from the optimizer.")
    ] = None,
    split: Annotated[
        SplitName | None,
        typer.Option(
            help="What the models share: a pretrained network, the first part of their training (trunk), or their "
            "initial weights (start)."
        ),
    ] = None,
    method: Annotated[
        MethodName, typer.Option(help="How they will be merged, where that was measured.")
    ] = MethodName.LINEAR,
    devices: Annotated[
        int | None, typer.Option(min=1, help="That train at once, if the file does not say.")
    ] = None,
    accumulation: Annotated[
        int | None, typer.Option(min=1, help="Micro-batches of a step, if the file does not say.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether models trained like this will merge, and what to change.

    The noise scale of a training, η/(B(1 − μ)) for SGD and η/√B for Adam and its kin, goes with how well its
    models merge (arXiv 2510.04686). This reads it from settings, looks it up on the measured curve of the
    nearest experiment, and says what would move it to the best place. Nothing is trained.

    \b
    Example training.yaml:
        optimizer: adamw
        learning_rate: 2.0e-5
        per_device_train_batch_size: 8
        gradient_accumulation_steps: 4
        world_size: 2
        model_name_or_path: Qwen/Qwen2.5-7B
    For SGD: optimizer: sgd, lr, batch_size, momentum, weight_decay.

    \b
    Then for example:
        isthmus advise training.yaml --split pretrained --method ties
    """  # noqa: D301
    from isthmus.lab.noise.advice import advise
    from isthmus.lab.noise.evidence import evidence
    from isthmus.models.training_settings import read_training_settings

    settings = read_training_settings(training, devices=devices, accumulation=accumulation)
    advice = advise(
        settings,
        evidence(),
        network=None if network is None else network.value,
        split=None if split is None else split.value,
        method=method.value,
    )
    if as_json:
        typer.echo(json.dumps(_as_data(advice), indent=2, ensure_ascii=False))
        return
    for line in _lines(advice):
        typer.echo(printable(line))


def _as_data(advice: Advice) -> dict[str, object]:
    experiment = advice.experiment
    return {
        "settings": asdict(advice.settings),
        "noise_scale": advice.noise_scale,
        "formula": advice.formula,
        "verdict": advice.verdict,
        "gain": advice.gain,
        "good": advice.good,
        "flat": advice.flat,
        "collapse": advice.collapse,
        "experiment": {
            "name": experiment.name,
            "method": experiment.method,
            "optimizer": experiment.optimizer,
            "parameters": experiment.parameters,
            "epochs": experiment.epochs,
            "described": experiment.described,
            "range": experiment.range,
            "spread": experiment.spread,
            "optimum": asdict(experiment.optimum),
            "diverged": experiment.diverged,
            "command": experiment.command,
            "results": experiment.results,
        },
        "assumed": advice.assumed,
        "nearest": [point.model_dump() for point in advice.nearest],
        "changes": [asdict(change) for change in advice.changes],
        "decays": [series.model_dump() for series in advice.decays],
        "limits": advice.limits,
    }


def _lines(advice: Advice) -> list[str]:
    experiment = advice.experiment
    lines = [
        f"Noise scale {advice.noise_scale:.2e}: {advice.formula} ({advice.settings.optimizer}, from "
        f"{advice.settings.source})",
        "",
        f"Nearest experiment: {experiment.name}: {experiment.described}.",
        *(f"  Assumed: {each}." for each in advice.assumed),
        *(f"  {each}" for each in _curve_lines(advice)),
        "",
        advice.verdict,
        "",
        "Settings measured nearest to it (gains: mean ± deviation over seeds):",
        *table(_rows(advice.nearest, experiment.family == "sgd"), left=(), width=room()),
        "",
        *_change_lines(advice),
    ]
    for series in advice.decays:
        lines += [
            f"Weight decay at one noise scale ({series.name}: {series.described}):",
            *table(_decay_rows(series.points), left=(), width=room()),
            "",
        ]
    lines += ["Limits:", *(f"- {each}" for each in advice.limits)]
    lines.append(f"Evidence: `{experiment.command}`, {experiment.results}, docs/lab-noise.md.")
    return lines


def _curve_lines(advice: Advice) -> Iterator[str]:
    experiment, optimum = advice.experiment, advice.experiment.optimum
    least, largest = experiment.range
    best = experiment.most_accurate
    yield f"Measured: noise scales from {least:.1e} to {largest:.1e}."
    if not advice.flat:
        yield (
            f"Highest gain: {100 * optimum.height:+.2f} points at {optimum.at:.1e} (95 %: {optimum.interval[0]:.1e} to "
            f"{optimum.interval[1]:.1e})."
        )
    yield (
        f"Most accurate merge: {100 * (best.accuracy + best.gain):.1f} % at {best.noise_scale:.1e}."
    )
    if not advice.flat:
        yield f"Good stretch: {advice.good[0]:.1e} to {advice.good[1]:.1e}."
    if advice.collapse is not None:
        yield f"Collapse: above {advice.collapse:.1e} the curve stays below zero by more than its scatter."
    elif optimum.height < -experiment.spread:
        yield "Collapse: everywhere; merging costs accuracy at the best noise scale too."
    else:
        yield "Collapse: none was measured."
    if experiment.diverged:
        count = len(experiment.diverged)
        first, last = (f"{experiment.diverged[end]:.1e}" for end in (0, -1))
        where = f"at {first}" if first == last else f"between {first} and {last}"
        yield f"Diverged in one seed or more, and on no curve: {count} setting{'s' * (count > 1)} {where}."


def _change_lines(advice: Advice) -> list[str]:
    if not advice.changes:
        return []
    lines = ["Towards models that merge, any one of these:"]
    for change in advice.changes:
        batch = change.setting == "batch size"
        value = f"{change.value:g}" if batch else f"{change.value:.3g}"
        of = "1 − μ " if change.setting == "momentum" else ""
        lines.append(
            f"- {change.setting} {change.old:g} → {value} ({of}× {change.factor:.3g}; noise scale "
            f"{change.noise_scale:.1e}): {change.cost}"
        )
    return [*lines, ""]


def _rows(points: tuple[Measured, ...], momentum: bool) -> list[list[str]]:
    middle = ["momentum"] if momentum else []
    return [
        ["noise scale", "learning rate", "batch", *middle, "parents, %", "gain, points"],
        *(
            [
                f"{point.noise_scale:.1e}",
                f"{point.settings['lr']:g}",
                f"{point.settings['batch']:g}",
                *(f"{point.settings.get('momentum', 0):g}" for _ in middle),
                f"{100 * point.accuracy:.2f}",
                f"{100 * point.gain:+.2f} ± {100 * point.deviation:.2f}",
            ]
            for point in points
        ),
    ]


def _decay_rows(points: tuple[Measured, ...]) -> list[list[str]]:
    return [
        ["weight decay", "parents, %", "gain, points"],
        *(
            [
                f"{point.settings['weight_decay']:g}",
                f"{100 * point.accuracy:.2f}",
                f"{100 * point.gain:+.2f} ± {100 * point.deviation:.2f}",
            ]
            for point in points
        ),
    ]
