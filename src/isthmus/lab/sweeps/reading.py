"""A sweep as a YAML file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isthmus.errors import RecipeError
from isthmus.lab.sweeps.experiments import EXPERIMENTS, Experiment
from isthmus.lab.sweeps.plan import Sweep
from isthmus.recipes.document import KeyPath, parse_document
from isthmus.recipes.problems import Problems, nearest

_KEYS = ("experiment", "base", "grid", "list", "seeds")
MOST = 100_000
"""Runs of a sweep."""


def read_sweep(path: Path, experiments: Mapping[str, Experiment] = EXPERIMENTS) -> Sweep:
    """Read a sweep.

    ``experiment`` names what every run does, ``base`` holds settings of all runs, ``grid`` lists of values whose
    every combination is a run, ``list`` runs one by one, and ``seeds`` repeats each run with each seed.

    Args:
        path: The file.
        experiments: By name.

    Raises:
        RecipeError: The file cannot be read, or something in it is wrong: all of it, with lines and nearest names.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}", "Name a YAML file.") from error
    if not text.strip():
        raise RecipeError(f"{path} is empty", f"A sweep has the keys {', '.join(_KEYS)}.")
    document = parse_document(text, str(path), what="a sweep", such_as="experiment: training")
    problems = Problems(document)
    data = document.data
    for key in data:
        if key not in _KEYS:
            near = nearest(key, _KEYS)
            problems.add(
                (key,),
                f"unknown key {key!r}; "
                + (f"did you mean {near!r}?" if near else f"known are {', '.join(_KEYS)}"),
            )
    experiment = _experiment(data, experiments, problems)
    base = _mapping(data, "base", problems)
    grid = _mapping(data, "grid", problems)
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            problems.add(("grid", key), f"{key} must be a list of values")
    listed = _list(data, "list", problems)
    for place, each in enumerate(listed):
        if not isinstance(each, dict):
            problems.add(("list", place), "every run of the list must be a mapping of settings")
    seeds = _list(data, "seeds", problems)
    problems.raise_if_any()
    count = (math.prod(map(len, grid.values())) if grid else 0) + len(listed)
    count = (count or 1) * max(1, len(seeds))
    if count > MOST:
        raise RecipeError(f"{path}: the sweep has {count:,} runs", f"Have at most {MOST:,}.")
    runs = []
    for where, settings in _runs(base, grid, listed):
        for seed in seeds or [None]:
            run = settings if seed is None else {**settings, "seed": seed}
            runs.append(run)
            if experiment is not None:
                _check(experiment, run, where, problems)
    problems.raise_if_any()
    return Sweep(data["experiment"], tuple(runs))


def _runs(
    base: dict[str, Any], grid: dict[str, Any], listed: list[Any]
) -> Iterator[tuple[dict[str, KeyPath], dict[str, Any]]]:
    """Every run's settings, and where each of them stands."""
    there: dict[str, KeyPath] = {key: ("base", key) for key in base}
    if grid or not listed:
        places = there | {key: ("grid", key) for key in grid}
        for values in product(*grid.values()):
            yield places, {**base, **dict(zip(grid, values, strict=True))}
    for number, each in enumerate(listed):
        yield there | {key: ("list", number, key) for key in each}, {**base, **each}


def _check(
    experiment: Experiment, run: Mapping[str, Any], where: Mapping[str, KeyPath], problems: Problems
) -> None:
    """Note what the experiment refuses, each once."""
    model = experiment.model()
    try:
        model.model_validate(dict(run))
    except ValidationError as error:
        for detail in error.errors():
            key = str(detail["loc"][0]) if detail["loc"] else None
            if detail["type"] == "extra_forbidden":
                near = nearest(str(key), model.model_fields)
                text = f"{experiment.name} has no setting {key!r}; " + (
                    f"did you mean {near!r}?"
                    if near
                    else f"known are {', '.join(model.model_fields)}"
                )
            elif key is None:
                text = f"{detail['msg'].removeprefix('Value error, ')} (in the run {dict(run)})"
            else:
                text = f"{key} is {detail['input']!r}: {detail['msg']}"
            path: KeyPath = where.get(key or "", ("seeds",) if key == "seed" else ("experiment",))
            if not problems.knows(path, text):
                problems.add(path, text)


def _experiment(
    data: Mapping[str, Any], experiments: Mapping[str, Experiment], problems: Problems
) -> Experiment | None:
    name = data.get("experiment")
    if isinstance(name, str) and name in experiments:
        return experiments[name]
    near = nearest(name, experiments) if isinstance(name, str) else None
    hint = f"did you mean {near!r}?" if near else f"there are {', '.join(experiments)}"
    said = "a sweep names its experiment" if name is None else f"there is no experiment {name!r}"
    problems.add(("experiment",), f"{said}; {hint}")
    return None


def _mapping(data: Mapping[str, Any], key: str, problems: Problems) -> dict[str, Any]:
    found = data.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        problems.add((key,), f"{key} must be a mapping of settings")
        return {}
    return found


def _list(data: Mapping[str, Any], key: str, problems: Problems) -> list[Any]:
    found = data.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not found:
        problems.add((key,), f"{key} must be a list, and not an empty one")
        return []
    return found
