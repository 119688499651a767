"""The merges that the experiments with encoders compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.lab.candidates import Recipe
from isthmus.lab.tuning import Trial

if TYPE_CHECKING:
    from isthmus.lab.projection.calibration import Calibration

DENSITIES = (0.5, 0.2, 0.8)
"""Shares that sparse methods may keep, in the order in which they are tried."""

BASES = ("scalar", "diagonal", "columns", "optimal")


@dataclass(frozen=True)
class ModelContest:
    """One line of the table: a method and its settings.

    Attributes:
        name: What the line is called.
        method: The merge method.
        scaled: Whether validation chooses ``lambda``.
        densities: Values of ``density`` that it chooses from; empty for methods without it.
        constants: Other parameters of global scope.
        reads: What a calibrated method needs: examples, or moments of the experts' inputs alone.
        weights: Weight by task, where it is not 1.
    """

    name: str
    method: str
    scaled: bool = False
    densities: tuple[float, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    reads: str = ""
    weights: Mapping[str, float] = field(default_factory=dict)

    def recipe(
        self,
        base: Path,
        experts: Mapping[str, Path],
        calibrations: Mapping[str, Calibration],
        trial: Trial,
        seed: int,
    ) -> Recipe:
        """The recipe with a trial's values in it.

        Args:
            base: The base encoder.
            experts: Folder of each task's expert.
            calibrations: By task.
            trial: Scale and density.
            seed: From which random methods draw.
        """
        models: list[dict[str, Any]] = []
        for task, folder in experts.items():
            parameters: dict[str, Any] = {"weight": self.weights.get(task, 1.0)}
            if trial.density is not None:
                parameters["density"] = trial.density
            entry: dict[str, Any] = {"model": str(folder), "parameters": parameters}
            if self.reads:
                entry["calibration"] = calibrations[task].entry(stored=self.reads == "moments")
            models.append(entry)
        parameters = dict(self.constants)
        if self.scaled:
            parameters["lambda"] = trial.scale
        recipe: Recipe = {
            "name": f"{self.name} of {len(experts)} experts",
            "merge_method": self.method,
            "models": models,
            "seed": seed,
        }
        if self.method != "linear":
            recipe["base_model"] = str(base)
        if parameters:
            recipe["parameters"] = parameters
        return recipe

    def suits(self, family: str) -> bool:
        """Whether it ends in minutes: columns of MiniLM's widest layers are 9,222 unknowns, which all interact."""
        return family != "text" or self.constants.get("basis") != "columns"


def projection(
    name: str, *, sequential: bool, weights: Mapping[str, float] | None = None, **constants: Any
) -> ModelContest:
    """A line of the method projection."""
    return ModelContest(
        name,
        "projection",
        constants={**constants, "sequential": sequential},
        reads="examples" if sequential else "moments",
        weights=weights or {},
    )


CONTESTS: tuple[ModelContest, ...] = (
    ModelContest("linear", "linear"),
    ModelContest("task_arithmetic", "task_arithmetic", scaled=True),
    ModelContest("ties", "ties", scaled=True, densities=DENSITIES),
    ModelContest("dare_ties", "dare_ties", scaled=True, densities=DENSITIES),
    ModelContest("fisher", "fisher", reads="moments"),
    ModelContest("regmean", "regmean", reads="moments"),
    *(projection(f"projection {basis}", sequential=False, basis=basis) for basis in BASES),
    ModelContest("regmean++", "regmean++", reads="examples"),
    *(projection(f"projection {basis} seq.", sequential=True, basis=basis) for basis in BASES),
)
"""Projection is run without a ridge, RegMean at the 0.9 of its paper: nothing is chosen for them."""

LARGE = tuple(
    contest for contest in CONTESTS if contest.constants.get("basis") not in {"scalar", "columns"}
)
"""Those that are worth their time on a model of a hundred million parameters."""
