"""Merges of fine-tunes, each at the λ and the density that validation likes best."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.memory import merge_state_dicts
from isthmus.paths.distance import relative_distance

State = Mapping[str, Tensor]
Judge = Callable[[State], float]
"""Gives an accuracy, from 0 to 1."""

LAMBDAS = (0.3, 0.5, 0.7, 1.0)
TIES = tuple((density, scale) for density in (0.2, 0.5) for scale in (0.5, 1.0, 1.5))
"""Densities and λ that are tried; what validation likes best is judged on test data."""


def merge_figures(
    base: State, experts: Sequence[State], accuracy: float, *, validate: Judge, test: Judge
) -> dict[str, Any]:
    """Merge fine-tunes by the mean, by task arithmetic and by TIES, and judge the merges.

    Args:
        base: The tensors that the fine-tunes began with.
        experts: The fine-tunes' tensors, two or more.
        accuracy: The experts' mean, each on its own task, on test data.
        validate: Judges on validation data, by which each method's setting is chosen: the first of equals.
        test: Judges on test data, which no choice sees.

    Returns:
        By method ``METHOD_accuracy``, ``METHOD_gain`` over the experts' mean and ``METHOD_setting``;
        ``distance`` of the experts, relative to the norm of one, and ``cosine`` of their task vectors, both
        as means over pairs.
    """
    pairs = list(combinations(experts, 2))
    found: dict[str, Any] = {
        "distance": fmean(relative_distance(*pair) for pair in pairs),
        "cosine": fmean(_cosine(base, *pair) for pair in pairs),
    }
    for method, candidates in _candidates(base, experts).items():
        best = next(iter(candidates))
        if len(candidates) > 1:
            scores = {name: validate(merged()) for name, merged in candidates.items()}
            best = max(scores, key=lambda name: scores[name])
        reached = test(candidates[best]())
        found |= {
            f"{method}_accuracy": reached,
            f"{method}_gain": reached - accuracy,
            f"{method}_setting": best,
        }
    return found


def _candidates(
    base: State, experts: Sequence[State]
) -> dict[str, dict[str, Callable[[], dict[str, Tensor]]]]:
    """By method and setting what merges; all merged models at once would not fit everywhere."""
    models = {f"expert-{number}": expert for number, expert in enumerate(experts)}

    def arithmetic(method: str, scale: float, **more: float) -> Callable[[], dict[str, Tensor]]:
        parameters: dict[str, Any] = {"lambda": scale, **more}
        return partial(merge_state_dicts, models, base=base, method=method, **parameters)

    return {
        "linear": {"": partial(merge_state_dicts, models)},
        "task_arithmetic": {
            f"λ {scale:g}": arithmetic("task_arithmetic", scale) for scale in LAMBDAS
        },
        "ties": {
            f"density {density:g}, λ {scale:g}": arithmetic("ties", scale, density=density)
            for density, scale in TIES
        },
    }


def _cosine(base: State, a: State, b: State) -> float:
    """Of two task vectors, in float64."""
    one, other = (
        torch.cat([(expert[name] - value).double().flatten() for name, value in base.items()])
        for expert in (a, b)
    )
    return float(one @ other / (one.norm() * other.norm()))
