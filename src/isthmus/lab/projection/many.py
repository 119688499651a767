"""The merges over which captured energy is correlated with accuracy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from isthmus.lab.projection.contests import BASES, ModelContest, projection
from isthmus.lab.tuning import Trial


@dataclass(frozen=True)
class Variant:
    """One merge.

    Attributes:
        group: Its kind.
        contest: Its method.
        trial: Scale and density.
        without: Families of encoders that would take hours for it.
    """

    group: str
    contest: ModelContest
    trial: Trial = field(default_factory=Trial)
    without: tuple[str, ...] = ()


def _heuristics() -> Iterator[Variant]:
    yield Variant("heuristics", ModelContest("linear", "linear"))
    for scale in (0.1, 0.25, 0.5, 0.75, 1.0):
        arithmetic = ModelContest(f"task_arithmetic λ={scale:g}", "task_arithmetic", scaled=True)
        yield Variant("heuristics", arithmetic, Trial(scale))
    for method in ("ties", "dare_ties"):
        for scale, density in ((0.5, 0.2), (1.0, 0.2), (2.0, 0.2), (1.0, 0.8)):
            name = f"{method} λ={scale:g}, density {density:g}"
            sparse = ModelContest(name, method, scaled=True, densities=(density,))
            yield Variant("heuristics", sparse, Trial(scale, density))


def _neighbours() -> Iterator[Variant]:
    yield Variant("neighbours", ModelContest("fisher", "fisher", reads="moments"))
    for keep in (0.0, 0.5, 0.9):
        regmean = ModelContest(
            f"regmean keep={keep:g}", "regmean", constants={"keep": keep}, reads="moments"
        )
        yield Variant("neighbours", regmean)
    for keep in (0.9, 1.0):
        sequential = ModelContest(
            f"regmean++ keep={keep:g}", "regmean++", constants={"keep": keep}, reads="examples"
        )
        yield Variant("neighbours", sequential)


def _bases() -> Iterator[Variant]:
    for basis in BASES:
        yield Variant("projection", projection(basis, sequential=False, basis=basis))
        yield Variant("projection", projection(f"{basis} seq.", sequential=True, basis=basis))
    for constraint in ("box", "simplex"):
        for basis in ("scalar", "diagonal"):
            settings: dict[str, Any] = {"basis": basis, "constraint": constraint}
            name = f"{basis}, {constraint}"
            yield Variant("projection", projection(name, sequential=False, **settings))
    box = projection("columns, box", sequential=False, basis="columns", constraint="box")
    yield Variant("projection", box, without=("text",))
    for basis in ("columns", "optimal"):
        for ridge in (0.01, 1.0):
            name = f"{basis}, ridge {ridge:g}"
            ridged = projection(name, sequential=False, basis=basis, ridge=ridge)
            yield Variant("projection", ridged)
    for ridge in (1e-4, 1e-2):
        name = f"optimal seq., ridge {ridge:g}"
        ridged = projection(name, sequential=True, basis="optimal", ridge=ridge)
        yield Variant("projection", ridged)
    for rank in (4, 32):
        ranked = projection(f"rank {rank}", sequential=False, basis="optimal", directions=rank)
        yield Variant("projection", ranked)


def _parts() -> Iterator[Variant]:
    """Some layers, or some tasks: the others stay averaged, or without weight."""
    for name, inside, outside in (("attention", "optimal", "none"), ("MLP", "none", "optimal")):
        basis = [{"filter": "attention", "value": inside}, {"value": outside}]
        yield Variant("parts", projection(f"optimal, {name}", sequential=False, basis=basis))
    some = dict.fromkeys(("news", "sections", "spam", "mnist_high", "fashion_high"), 0.0)
    for basis_name in ("diagonal", "optimal"):
        name = f"{basis_name} of half of the tasks"
        half = projection(name, sequential=False, weights=some, basis=basis_name)
        yield Variant("parts", half)
    sum_of_half = ModelContest(
        "task_arithmetic of half of the tasks", "task_arithmetic", scaled=True, weights=some
    )
    yield Variant("parts", sum_of_half, Trial(0.5))


MANY: tuple[Variant, ...] = (*_heuristics(), *_neighbours(), *_bases(), *_parts())
"""Every merge is judged by one objective, whatever it minimised itself."""
