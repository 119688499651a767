"""Running an experiment with paths: trainings, pairs, results, table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from isthmus.lab.machine import environment, let_threads_sleep, torch_threads
from isthmus.lab.paths.results import Joined, PathResults
from isthmus.lab.paths.tables import grid_of
from isthmus.lab.progress import Narrator

Experiment = Literal["mlp", "many", "resnet", "gpt2"]

_BARRIERS = {"train barrier": "train barrier", "test barrier": "test barrier"}
FIGURES: dict[Experiment, dict[str, str]] = {
    "mlp": _BARRIERS
    | {
        "train ends": "train loss, ends",
        "test accuracy ends": "test acc., ends",
        "test accuracy middle": "test acc., t=½",
    },
    "many": {
        "train loss ends": "train loss, each",
        "train loss mean": "train loss, mean",
        "test accuracy ends": "test acc., each",
        "test accuracy mean": "test acc., mean",
        "rest": "distance to the mean",
    },
    "resnet": _BARRIERS
    | {"test accuracy ends": "test acc., ends", "test accuracy middle": "test acc., t=½"},
    "gpt2": {
        "own barrier": "barrier",
        "own ends": "loss, ends",
        "distance": "distance",
        "dictionary interior": "dictionary",
        "essays interior": "essays",
        "e-mail interior": "e-mail",
    },
}
"""By experiment the figures of the table, and their headings."""


def run_paths(
    experiment: Experiment,
    output: Path,
    *,
    cache: Path = Path(".cache"),
    quick: bool = False,
    threads: int = 2,
    narrator: Narrator | None = None,
) -> PathResults:
    """Train what is not trained yet, join the pairs, write ``results.json``, print the table.

    Args:
        experiment: ``mlp``, ``many``, ``resnet`` or ``gpt2``.
        output: Folder to write to; made if it is missing.
        cache: Where ``make data`` put its data, and where networks are kept.
        quick: Small sizes, to see it run.
        threads: Torch's.
        narrator: Shows the progress; on standard output by default.

    Raises:
        IsthmusError: Data is missing, or a training fails.
    """
    told = Narrator() if narrator is None else narrator
    output.mkdir(parents=True, exist_ok=True)
    let_threads_sleep()
    with torch_threads(threads):
        settings, found = _run(experiment, cache, told, quick=quick)
    results = PathResults(
        experiment,
        settings,
        FIGURES[experiment],
        tuple(found),
        tuple(told.stages),
        environment(threads),
    )
    results.write(output / "results.json")
    told.console.print(grid_of(results).table())
    told.say(f"Results are in {output / 'results.json'}")
    return results


def _run(
    experiment: Experiment, cache: Path, narrator: Narrator, *, quick: bool
) -> tuple[dict[str, Any], list[Joined]]:
    @contextmanager
    def stage(name: str) -> Iterator[None]:
        with narrator.stage(name):
            yield

    if experiment in ("mlp", "many"):
        from isthmus.lab.paths.mlps import MlpSettings, run_many, run_mlps

        mlps = MlpSettings()
        if quick:
            mlps = replace(
                mlps, widths=(16, 64), pairs=((0, 1),), epochs=10, learned=20, bend=30, many=3
            )
        return (run_many if experiment == "many" else run_mlps)(mlps, cache, stage)
    if experiment == "resnet":
        from isthmus.lab.paths.resnets import ResNetSettings, run_resnets

        nets = ResNetSettings()
        if quick:
            nets = replace(
                nets,
                width=8,
                pairs=((0, 1),),
                training=1_000,
                test=500,
                epochs=1,
                reset=500,
                points=5,
            )
        return run_resnets(nets, cache, stage)
    from isthmus.lab.paths.language_paths import LanguagePaths, run_gpt2

    language = LanguagePaths()
    return run_gpt2(language.quick() if quick else language, cache, stage)
