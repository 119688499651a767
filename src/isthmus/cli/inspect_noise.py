"""What `isthmus inspect --noise` says: how noisy a model's gradients are on data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from isthmus.cli.text import count, printable, room, table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from isthmus.checkpoints import Checkpoint
    from isthmus.models.noise_data import NoiseData
    from isthmus.models.noise_report import NoiseReport, TrainedNoise
    from isthmus.models.training_settings import TrainingSettings
    from isthmus.optim.gradient_noise import NoiseEstimate, NormNoise


def required(
    models: Sequence[str],
    noise: bool,
    data: Path | None,
    calibration: Sequence[Path] | None,
    report: Path | None,
) -> Path:
    """The data, if the options go together.

    Raises:
        TrainingError: They do not.
    """
    from isthmus.errors import TrainingError

    if not noise:
        raise TrainingError(
            "--data, --training, --sign and --spectral are of the gradients' noise, which is not asked for",
            "Add --noise.",
        )
    if data is None:
        raise TrainingError(
            "--noise is measured on examples, and there are none",
            "Give --data: texts, or images by class.",
        )
    if len(models) > 1 or calibration or report is not None:
        raise TrainingError(
            "--noise is of one model alone; several models, --calibration and --report are of comparisons",
            "Measure the models one by one.",
        )
    return data


def run(
    model: str,
    given: NoiseData,
    *,
    cache: Path,
    training: Path | None,
    sign: bool,
    spectral: bool,
    most: int | None,
    as_json: bool,
) -> None:
    """Measure with a bar, and print.

    Args:
        model: As `open_checkpoint` takes it.
        given: The data.
        cache: Where `make data` put its data.
        training: A file or folder with settings.
        sign: Whether to measure the sign version.
        spectral: Whether to measure the spectral version.
        most: So many blocks at most; all if None.
        as_json: Whether to print JSON.

    Raises:
        IsthmusError: As `noise_report`, `read_training_settings` and `training_data`.
    """
    from isthmus.checkpoints import open_checkpoint
    from isthmus.models.noise_report import with_training
    from isthmus.models.training_settings import read_training_settings

    settings = None if training is None else read_training_settings(training)
    with open_checkpoint(model) as checkpoint:
        found = _measured(checkpoint, _with_pictures(checkpoint, given, cache), sign, spectral)
        label = checkpoint.label
    trained = None if settings is None else with_training(found, settings)
    if as_json:
        content = {"model": label, "noise": as_data(found)}
        if settings is not None and trained is not None:
            content["training"] = _training_data(settings, trained)
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
        return
    _print(label, found, most)
    if settings is not None and trained is not None:
        _print_training(settings, trained)


def _measured(checkpoint: Checkpoint, given: NoiseData, sign: bool, spectral: bool) -> NoiseReport:
    from isthmus.cli.progress import terminal_progress
    from isthmus.models.noise_report import noise_report

    progress = terminal_progress()
    begun = False

    def report(_done: int, total: int) -> None:
        nonlocal begun
        if not begun:
            progress.begin("measuring gradients", total, counts=True)
            begun = True
        progress.advance(1)

    try:
        return noise_report(
            checkpoint, given, sign_version=sign, spectral_version=spectral, report=report
        )
    finally:
        if begun:
            progress.finish()


def _with_pictures(checkpoint: Checkpoint, given: NoiseData, cache: Path) -> NoiseData:
    """Images that go by a name, where the model takes images and there is no such file."""
    from isthmus.models.data import sees_alone

    if given.data.exists() or not sees_alone(checkpoint.config or {}):
        return given
    return replace(given, pictures=_named(str(given.data), cache))


def _named(name: str, cache: Path) -> Iterator[tuple[NDArray[np.float32], int]]:
    from isthmus.errors import TrainingError
    from isthmus.lab.data.named import training_data

    found = training_data(name, cache)
    if not found.inputs.is_floating_point():
        raise TrainingError(f"{name} holds texts, and the model takes images", "Name images.")
    for picture, label in zip(found.inputs, found.targets.tolist(), strict=True):
        yield picture.permute(1, 2, 0).contiguous().numpy(), label


def _print(label: str, found: NoiseReport, most: int | None) -> None:
    what = f"{found.kind}{'s' if found.examples != 1 else ''}"
    typer.echo(
        printable(
            f"{label}: gradients of {found.examples:,} {what} in micro-batches of {found.batch}, "
            f"{count(found.total.blocks, 'block')} of {found.block}"
        )
    )
    rows = [["", "estimate", "95 % interval"]]
    total = found.total
    rows += [
        ["trΣ", _number(total.trace), _interval(total.trace_interval)],
        ["‖G‖²", _number(total.squared_norm), _interval(total.squared_norm_interval)],
        [f"trΣ/‖G‖², {found.kind}s", _number(total.scale), _interval(total.scale_interval)],
    ]
    typer.echo("")
    _print_table(rows)
    for name, version in (("sign", found.sign), ("spectral", found.spectral)):
        if version is not None:
            low, high = map(_number, version.scale)
            typer.echo(
                f"\n{name} version: from {low} to {high} {found.kind}s (no confidence interval)"
            )
    typer.echo(f"\n{found.reading}")
    if found.groups:
        _print_groups(found, most)


def _print_groups(found: NoiseReport, most: int | None) -> None:
    shares = {name: _share(group, found.total) for name, group in found.groups.items()}
    names = sorted(found.groups, key=lambda name: -shares[name])[:most]
    rows = [["block", "% of trΣ", "‖G‖²", "trΣ/‖G‖²", "95 % interval"]]
    for name in names:
        group = found.groups[name]
        rows.append(
            [
                name,
                f"{100 * shares[name]:.1f}",
                _number(group.squared_norm),
                _number(group.scale),
                _interval(group.scale_interval),
            ]
        )
    typer.echo("")
    _print_table(rows)
    if len(names) < len(found.groups):
        typer.echo(f"{count(len(found.groups) - len(names), 'more block')} (--all)")


def _print_training(settings: TrainingSettings, trained: TrainedNoise) -> None:
    known = [
        f"{name} {value}"
        for name, value in (
            ("optimizer", settings.optimizer),
            ("learning rate", settings.lr),
            ("batch", settings.batch_size),
            ("momentum", settings.momentum),
            ("weight decay", settings.weight_decay),
        )
        if value is not None
    ]
    typer.echo(
        printable(f"\nTraining, from {settings.source}: {', '.join(known) or 'nothing known'}")
    )
    if trained.effective is None:
        typer.echo(printable(f"  effective noise scale: not known: {trained.missing}"))
    else:
        formula = "η/√B" if settings.adaptive else "η/(B(1 − μ))"
        typer.echo(f"  effective noise scale {formula}: {_number(trained.effective)}")
    if trained.ratio is not None and trained.ratio_interval is not None:
        typer.echo(
            f"  noise over signal in a step's gradient, trΣ/(B‖G‖²): {_number(trained.ratio)} "
            f"({_interval(trained.ratio_interval)})"
        )
    if trained.diffusion is not None:
        typer.echo(f"  diffusion of the weights, η/(B(1 − μ))·trΣ: {_number(trained.diffusion)}")


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    for line in table(rows, left=(0,), width=room()):
        typer.echo(line)


def _share(group: NoiseEstimate, total: NoiseEstimate) -> float:
    return group.trace / total.trace if total.trace else 0.0


def _number(value: float) -> str:
    return "∞" if value == math.inf else f"{value:.4g}"


def _interval(ends: tuple[float, float]) -> str:
    return f"{_number(ends[0])} to {_number(ends[1])}"


def as_data(found: NoiseReport) -> dict[str, Any]:
    """The same for JSON, where null stands for infinity."""
    return {
        "example": found.kind,
        "examples": found.examples,
        "micro_batch": found.batch,
        "block": found.block,
        "total": _estimate(found.total),
        "sign": _norm(found.sign),
        "spectral": _norm(found.spectral),
        "reading": found.reading,
        "blocks": {name: _estimate(group) for name, group in found.groups.items()},
    }


def _estimate(found: NoiseEstimate) -> dict[str, Any]:
    return {
        "trace": found.trace,
        "trace_interval": found.trace_interval,
        "squared_norm": found.squared_norm,
        "squared_norm_interval": found.squared_norm_interval,
        "scale": _finite(found.scale),
        "scale_interval": [_finite(end) for end in found.scale_interval],
        "independent_blocks": found.blocks,
    }


def _norm(found: NormNoise | None) -> Mapping[str, Any] | None:
    if found is None:
        return None
    return {
        "noise": found.noise,
        "gradient": found.gradient,
        "scale": [_finite(end) for end in found.scale],
    }


def _training_data(settings: TrainingSettings, trained: TrainedNoise) -> dict[str, Any]:
    interval = trained.ratio_interval
    return {
        "source": settings.source,
        "optimizer": settings.optimizer,
        "learning_rate": settings.lr,
        "batch_size": settings.batch_size,
        "momentum": settings.momentum,
        "weight_decay": settings.weight_decay,
        "effective_noise_scale": trained.effective,
        "missing": trained.missing,
        "noise_over_signal": None if trained.ratio is None else _finite(trained.ratio),
        "noise_over_signal_interval": None
        if interval is None
        else [_finite(end) for end in interval],
        "diffusion": trained.diffusion,
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
