"""The merges that the suite compares: every method that takes adapters, in the spaces it is known in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isthmus.lab.candidates import Recipe
from isthmus.lab.tuning import Trial
from isthmus.methods.parameters import ParameterValue

DENSITIES = (0.5, 0.2, 0.8)
"""Shares that sparse methods may keep, in the order in which they are tried."""


@dataclass(frozen=True)
class AdapterContest:
    """One line of the table: a method in a space, at a rank.

    Attributes:
        name: What the line is called.
        method: The merge method.
        space: Where it runs; None for the method's default.
        wide: Whether the result may have the adapters' ranks together instead of the largest.
        scaled: Whether it has ``lambda``, which multiplies the merged update and does nothing else.
        densities: Values of ``density`` to try; empty for methods without it.
        constants: Other parameters, of global scope.
    """

    name: str
    method: str
    space: str | None = None
    wide: bool = False
    scaled: bool = True
    densities: tuple[float, ...] = ()
    constants: dict[str, ParameterValue] = field(default_factory=dict)

    def recipe(self, adapters: Sequence[Path], trial: Trial, *, rank: int, seed: int) -> Recipe:
        """The recipe with a trial's values in it.

        Args:
            adapters: Folders of the adapters, all of one rank.
            trial: Scale and density.
            rank: The adapters' rank.
            seed: From which random methods draw.
        """
        parameters: dict[str, ParameterValue] = dict(self.constants)
        each: dict[str, ParameterValue] = {"weight": 1.0}
        if self.scaled:
            parameters["lambda"] = trial.scale
        if trial.density is not None:
            each["density"] = trial.density
        recipe: Recipe = {
            "name": f"{self.name} of {len(adapters)} adapters",
            "merge_method": self.method,
            "models": [{"model": str(path), "parameters": dict(each)} for path in adapters],
            "rank": rank * len(adapters) if self.wide else rank,
            "seed": seed,
        }
        if parameters:
            recipe["parameters"] = parameters
        if self.space is not None:
            recipe["space"] = self.space
        return recipe


def _narrow_and_wide(name: str, method: str, space: str | None = None) -> list[AdapterContest]:
    """A sparse method that elects signs: at the adapters' rank, and at all ranks together."""
    return [
        AdapterContest(name, method, space, densities=DENSITIES),
        AdapterContest(f"{name} wide", method, space, wide=True, densities=DENSITIES),
    ]


CONTESTS: tuple[AdapterContest, ...] = (
    AdapterContest("linear", "linear", scaled=False),
    AdapterContest("task_arithmetic", "task_arithmetic"),
    AdapterContest("cat", "cat", wide=True),
    AdapterContest("magnitude", "magnitude", densities=DENSITIES),
    *_narrow_and_wide("ties", "ties"),
    AdapterContest("dare_linear", "dare_linear", densities=DENSITIES),
    AdapterContest("dare_ties", "dare_ties", densities=DENSITIES),
    *_narrow_and_wide("knots_ties", "ties", "knots"),
    AdapterContest("knots_dare_ties", "dare_ties", "knots", densities=DENSITIES),
    *_narrow_and_wide("core_ties", "ties", "core"),
    AdapterContest("core_tsv", "tsv", "core"),
    AdapterContest("core_tsv wide", "tsv", "core", wide=True),
    AdapterContest("iso_c wide", "iso_c", wide=True),
    AdapterContest("iso_cts wide", "iso_cts", wide=True),
    *(
        AdapterContest(f"geomerge {distance}", "geomerge", constants={"distance": distance})
        for distance in ("canonical", "grassmann", "projection")
    ),
)
"""`linear` is the plain mean; its multiples are those of `task_arithmetic`. The flat spectra of the
iso methods have no good approximation of lower rank, so they are wide alone."""
