"""Which merge to take, from the diagnosis of all layers.

The simplest merge is recommended whose expected error is hardly larger than the smallest one. On the
calibration inputs a larger basis always leaves less; on other inputs the coefficients that it fitted to these
inputs cost something, which `LayerDiagnosis.expected` estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from isthmus.errors import MethodError
from isthmus.projection.diagnosis import BASES, HEURISTICS, ROUNDING, LayerDiagnosis, in_all, scaled
from isthmus.projection.layer import DARE_DENSITY, TIES_DENSITY

ALIKE = 0.02
"""Merges whose errors differ by no more than this share of J(0) count as equally good."""

CONFLICT = 0.5
"""Where the best weights leave more than this share of J(0), the experts contradict each other."""

HURTING = 0.5
"""The layers that are named hold this share of what is left, unless they are too many."""

NAMED = 5
"""So many layers are named at most."""

FEW = 2
"""So many layers are named where something is degenerate; more are counted."""


_RECIPES: Mapping[str, Mapping[str, Any]] = {
    "soup": {"merge_method": "linear", "parameters": {"weight": 1.0}},
    "task arithmetic": {
        "merge_method": "task_arithmetic",
        "parameters": {"weight": 1.0, "lambda": 1.0},
    },
    "TIES": {"merge_method": "ties", "parameters": {"weight": 1.0, "density": TIES_DENSITY}},
    "DARE": {"merge_method": "dare_linear", "parameters": {"weight": 1.0, "density": DARE_DENSITY}},
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One merge of the whole network.

    Attributes:
        name: Of the heuristic, or of the projection's basis.
        calibrated: Whether merging needs the calibration inputs.
        left: Share of J(0) that it leaves on them.
        expected: Share to expect on as many other inputs; infinite where coefficients are too many.
        recipe: What a recipe says: the method and its parameters.
    """

    name: str
    calibrated: bool
    left: float
    expected: float
    recipe: Mapping[str, Any]

    @property
    def captured(self) -> float:
        """1 − `left`: the captured energy."""
        return 1 - self.left


@dataclass(frozen=True)
class Recommendation:
    """What to do, and why.

    Attributes:
        total: The sums over layers.
        choices: All merges, simple ones first; empty where J(0) = 0.
        chosen: Which to take, or None where no merge is worth it.
        hurting: The share of each layer in what the chosen merge leaves, largest first; of the best weights
            if none is chosen.
        sentences: All of it in words.
    """

    total: LayerDiagnosis
    choices: tuple[Choice, ...]
    chosen: Choice | None
    hurting: Mapping[str, float] = field(default_factory=dict)
    sentences: tuple[str, ...] = ()


def recommend(layers: Mapping[str, LayerDiagnosis]) -> Recommendation:
    """Choose a merge for a network.

    Args:
        layers: The diagnosis of each layer, by its name.

    Raises:
        MethodError: There are no layers.
    """
    if not layers:
        raise MethodError(
            "a recommendation for no layers", "diagnose at least one layer that all models have"
        )
    total = in_all([*layers.values()])
    if total.initial == 0:
        idle = (
            "On the calibration inputs every layer of the experts answers as the base's does: there is "
            "nothing to merge. Take the base.",
        )
        return Recommendation(total, (), None, sentences=(*idle, *_remarks(layers)))
    choices = tuple(_choices([*layers.values()], total))
    least = min(choice.expected for choice in choices)
    chosen = None
    if least <= 1 - ALIKE:
        chosen = next(choice for choice in choices if choice.expected <= least + ALIKE)
    hurting = _hurting(layers, chosen)
    sentences = (
        _verdict(choices, chosen),
        *_larger(choices, chosen, [*layers.values()]),
        *_conflict(choices),
        *_named(hurting, chosen),
        *_remarks(layers),
    )
    return Recommendation(total, choices, chosen, hurting, sentences)


def _choices(layers: Sequence[LayerDiagnosis], total: LayerDiagnosis) -> Iterator[Choice]:
    best = total.best_scale
    for name in HEURISTICS:
        left = total.heuristics[name] / total.initial
        yield Choice(name, False, left, left, _RECIPES[name])
        if name == "task arithmetic" and best != 1:
            left = total.scales[best] / total.initial
            parameters = {**_RECIPES[name]["parameters"], "lambda": best}
            recipe = {**_RECIPES[name], "parameters": parameters}
            yield Choice(scaled(best), False, left, left, recipe)
    for basis in BASES:
        if basis in total.projections:
            expected = sum(layer.expected(basis) for layer in layers) / total.initial
            recipe = {"merge_method": "projection", "parameters": {"basis": basis}}
            yield Choice(basis, True, total.projections[basis] / total.initial, expected, recipe)


def _hurting(layers: Mapping[str, LayerDiagnosis], chosen: Choice | None) -> dict[str, float]:
    def left(layer: LayerDiagnosis) -> float:
        if chosen is None:
            return layer.projections["optimal"]
        if chosen.name.startswith("task arithmetic"):
            return layer.scales[chosen.recipe["parameters"]["lambda"]]
        return layer.value(chosen.name)

    values = {name: left(layer) for name, layer in layers.items()}
    total = sum(values.values())
    if total <= ROUNDING * sum(layer.initial for layer in layers.values()):
        return {}
    ordered = sorted(values.items(), key=lambda item: -item[1])
    return {name: value / total for name, value in ordered}


def _verdict(choices: Sequence[Choice], chosen: Choice | None) -> str:
    heuristic = min(_some(choices, calibrated=False), key=lambda choice: choice.left)
    projection = min(_some(choices, calibrated=True), key=lambda choice: choice.expected)
    if chosen is None:
        return (
            f"No merge is worth it: the best heuristic, {heuristic.name}, leaves "
            f"{percent(heuristic.left)} of the base's error and the best projection, "
            f"{projection.name}, {percent(projection.left)} (on new inputs about "
            f"{percent(projection.expected)}). Keep the experts apart."
        )
    if not chosen.calibrated:
        return (
            f"Take {chosen.name}: it leaves {percent(chosen.left)} of the base's error, and the best "
            f"projection, {projection.name}, about {percent(projection.expected)} on new inputs. Spare "
            "yourself the calibrated merge."
        )
    return (
        f"Take projection with basis: {chosen.name}. It leaves {percent(chosen.left)} of the base's "
        f"error, on new inputs about {percent(chosen.expected)}; the best heuristic, "
        f"{heuristic.name}, leaves {percent(heuristic.left)}."
    )


def _larger(
    choices: Sequence[Choice], chosen: Choice | None, layers: Sequence[LayerDiagnosis]
) -> Iterator[str]:
    """A basis that would be better if there were more inputs."""
    best = min(choices, key=lambda choice: choice.left)
    taken = 1.0 if chosen is None else chosen.left
    if best is chosen or not best.calibrated or best.left > taken - ALIKE:
        return
    fewest = min(layer.inputs / layer.unknowns[best.name] for layer in layers)
    expected = "more than the base" if best.expected > 1 else f"about {percent(best.expected)}"
    yield (
        f"The basis {best.name} leaves {percent(best.left)} of the error on the calibration inputs, but "
        f"on new ones {expected}: in one layer at least there are only {fewest:.1f} inputs for each of "
        "its coefficients. With more calibration examples it may be the better choice."
    )


def _conflict(choices: Sequence[Choice]) -> Iterator[str]:
    optimal = next(choice for choice in choices if choice.name == "optimal")
    if optimal.left > CONFLICT:
        yield (
            f"The experts contradict each other: for the same inputs they want outputs of which no weights "
            f"can give more than a part, and even the best leave {percent(optimal.left)} of the base's "
            "error. Expect a merge to lose accuracy; fewer experts, or experts that are more alike, lose "
            "less."
        )


def _named(hurting: Mapping[str, float], chosen: Choice | None) -> Iterator[str]:
    if not hurting:
        return
    named: list[str] = []
    held = 0.0
    for name, share in hurting.items():
        if held >= HURTING or len(named) == NAMED:
            break
        named.append(f"{name} ({percent(share)})")
        held += share
    whose = "the best weights leave" if chosen is None else f"{chosen.name} leaves"
    hold = "holds" if len(named) == 1 else "hold"
    yield (
        f"{len(named)} of {len(hurting)} layers {hold} {percent(held)} of the error that {whose}: "
        f"{', '.join(named)}."
    )


def _remarks(layers: Mapping[str, LayerDiagnosis]) -> Iterator[str]:
    """What is degenerate, a sentence for each kind."""
    unchanged = {name: layer.unchanged for name, layer in layers.items()}
    for these, experts in _by_layers(unchanged).items():
        verb = "equals" if len(experts) == 1 else "equal"
        whose = _experts(experts).capitalize()
        yield f"{whose} {verb} the base {_where(these, layers)}."
    silent = {name: layer.silent for name, layer in layers.items()}
    for these, experts in _by_layers(silent).items():
        yield (
            f"All inputs of {_experts(experts)} are zero {_where(these, layers)}: calibration says "
            "nothing there."
        )
    open_ones = [name for name, layer in layers.items() if layer.notes]
    if open_ones:
        yield (
            f"Calibration does not determine all coefficients {_where(open_ones, layers)} "
            f"({'; '.join(layers[open_ones[0]].notes)} in {open_ones[0]}); projection takes those of "
            "least norm. Examples that differ more settle it, unless experts are equal."
        )


def _by_layers(found: Mapping[str, tuple[int, ...]]) -> dict[tuple[str, ...], list[int]]:
    """Experts by the layers in which something was found of them."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for expert in sorted({number for numbers in found.values() for number in numbers}):
        these = tuple(name for name, numbers in found.items() if expert in numbers)
        groups.setdefault(these, []).append(expert)
    return groups


def _experts(numbers: Sequence[int]) -> str:
    noun = "expert" if len(numbers) == 1 else "experts"
    return f"{noun} {', '.join(str(number + 1) for number in numbers)}"


def _where(names: Sequence[str], layers: Mapping[str, LayerDiagnosis]) -> str:
    if len(names) == len(layers):
        return "in all layers"
    if len(names) <= FEW:
        return f"in {', '.join(names)}"
    return f"in {len(names)} of {len(layers)} layers"


def _some(choices: Sequence[Choice], *, calibrated: bool) -> list[Choice]:
    return [choice for choice in choices if choice.calibrated is calibrated]


def percent(share: float) -> str:
    """A share as people read it, in three digits; rounding is nothing."""
    if abs(share) < ROUNDING:
        share = 0.0
    return f"{100 * share:.3g} %"
