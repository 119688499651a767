"""The experiments that a sweep can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pydantic import BaseModel

from isthmus.errors import IsthmusError
from isthmus.recipes.problems import nearest

Function = Callable[..., Mapping[str, Any]]


@dataclass(frozen=True)
class Experiment:
    """What one run does.

    Attributes:
        name: In a sweep's file.
        settings: ``module:class`` of its settings, a frozen pydantic model that forbids other keys.
        function: ``module:function``, called as ``function(settings, folder, tell, cache=cache)``: a folder of the
            run's own for checkpoints, a function that is told the share that is done, and the folder
            where `make data` put its data. It returns JSON values: figures by name. `Diverged` is a result too.
    """

    name: str
    settings: str
    function: str

    def model(self) -> type[BaseModel]:
        """The class of its settings."""
        found: type[BaseModel] = _imported(self.settings)
        return found

    def called(self) -> Function:
        """The function."""
        found: Function = _imported(self.function)
        return found


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "training",
            "isthmus.lab.noise.settings:SingleSettings",
            "isthmus.lab.noise.single:run_single",
        ),
        Experiment(
            "noise-pair",
            "isthmus.lab.noise.settings:PairSettings",
            "isthmus.lab.noise.pair:run_pair",
        ),
        Experiment(
            "noise-transfer",
            "isthmus.lab.noise.settings:TransferSettings",
            "isthmus.lab.noise.transfer:run_transfer",
        ),
        Experiment(
            "noise-text-transfer",
            "isthmus.lab.noise.text_settings:TextTransferSettings",
            "isthmus.lab.noise.text_transfer:run_text_transfer",
        ),
    )
}
"""By name."""


def experiment_of(name: str, known: Mapping[str, Experiment] = EXPERIMENTS) -> Experiment:
    """Look an experiment up.

    Raises:
        IsthmusError: There is none of the name.
    """
    if name not in known:
        near = nearest(name, known)
        hint = f"Did you mean {near!r}? " if near else ""
        raise IsthmusError(
            f"there is no experiment {name!r}", f"{hint}Experiments are {', '.join(known)}."
        )
    return known[name]


def _imported(place: str) -> Any:
    module, name = place.split(":")
    return getattr(import_module(module), name)
