"""Which runs a sweep has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from isthmus.errors import IsthmusError
from isthmus.lab.cache import content_key
from isthmus.lab.sweeps.experiments import Experiment

_LETTERS = 16


@dataclass(frozen=True)
class Sweep:
    """Runs of one experiment.

    Attributes:
        experiment: Its name.
        runs: For every run its settings, JSON values; what is left out has its default.
    """

    experiment: str
    runs: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class Planned:
    """A run with all its settings.

    Attributes:
        name: Of its folder: a hash of the experiment and the settings.
        settings: With defaults filled in, JSON values.
    """

    name: str
    settings: Mapping[str, Any]


def planned(sweep: Sweep, experiment: Experiment) -> tuple[Planned, ...]:
    """Check every run's settings and fill in defaults.

    Raises:
        IsthmusError: No runs, settings that the experiment refuses, or the same run twice.
    """
    if not sweep.runs:
        raise IsthmusError("the sweep has no runs", "Give a grid, a list, or both.")
    model = experiment.model()
    found: dict[str, Planned] = {}
    for number, run in enumerate(sweep.runs, start=1):
        try:
            settings = model.model_validate(dict(run)).model_dump(mode="json")
        except ValidationError as error:
            detail = error.errors()[0]
            where = ".".join(map(str, detail["loc"])) or "settings"
            raise IsthmusError(
                f"run {number} of the sweep, {json.dumps(dict(run))}: {where}: {detail['msg']}",
                f"{experiment.name} has the settings {', '.join(model.model_fields)}.",
            ) from error
        name = content_key({"experiment": experiment.name, "settings": settings})[:_LETTERS]
        if name in found:
            raise IsthmusError(
                f"run {number} of the sweep is there already: {json.dumps(dict(run))}",
                "Keep one of the two; runs that differ in a default only are the same.",
            )
        found[name] = Planned(name, settings)
    return tuple(found.values())
