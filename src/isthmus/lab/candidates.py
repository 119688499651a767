"""The merges that the demo tries: one or more recipes per method, as `isthmus merge` reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Recipe = dict[str, Any]

SCALES = (0.5, 1.0, 1.5)
"""Values of lambda that every task-vector method may choose from."""

POSITIONS = (0.25, 0.5, 0.75)
"""Values of t that slerp may choose from: as many as there are lambdas."""

DENSITY = 0.2
"""Share of a task vector that sparse methods keep: what the TIES paper keeps."""


ADAPTER_RANK = 8
"""Rank of the adapters that are taken out of the experts."""

MEAN_SCALES = (1.0, 2.0, 3.0)
"""Values of lambda for means, which are a third as long as sums of three: as many as SCALES."""


@dataclass(frozen=True)
class Candidate:
    """A recipe and what was set in it.

    Attributes:
        setting: The value that validation decides on, for people, such as ``λ=0.5``.
        recipe: The recipe.
    """

    setting: str
    recipe: Recipe


@dataclass(frozen=True)
class Contest:
    """One line of the table: a method, and the candidates that validation chooses from.

    Attributes:
        method: The merge method.
        tasks: The tasks whose experts take part; validation looks at these alone.
        candidates: At least one.
        note: What the reader must know, or nothing.
    """

    method: str
    tasks: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    note: str = ""


def contests(base: Path, experts: Mapping[str, Path]) -> list[Contest]:
    """Every method on the same experts, each with the same number of tries.

    Args:
        base: The encoder that the experts were fine-tuned from.
        experts: Folder of each task's expert; two or more.
    """
    tasks = tuple(experts)
    folders = [str(path) for path in experts.values()]
    ends = (tasks[0], tasks[-1])
    made = [
        Contest("linear", tasks, (Candidate("equal weights", _linear(folders)),)),
        _task_vectors("task_arithmetic", base, experts),
        _task_vectors("ties", base, experts, density=DENSITY),
        _task_vectors("dare_linear", base, experts, density=DENSITY),
        _task_vectors("dare_ties", base, experts, density=DENSITY),
        Contest(
            "slerp",
            ends,
            tuple(
                Candidate(f"t={t:g}", _slerp(str(experts[ends[0]]), str(experts[ends[1]]), t))
                for t in POSITIONS
            ),
        ),
        Contest("passthrough", tasks[:1], (Candidate("a copy", _passthrough(folders[0])),)),
    ]
    for contest in made:
        for candidate in contest.candidates:
            candidate.recipe["name"] = f"{contest.method} of {listed(contest.tasks)}"
    return made


def adapter_contests(base: Path, adapters: Mapping[str, Path]) -> list[Contest]:
    """Merges of adapters that were taken out of the experts, added to the base.

    Args:
        base: The encoder that the experts were fine-tuned from.
        adapters: Folder of each task's adapter; two or more.
    """

    def contest(method: str, scales: Sequence[float], **parameters: float) -> Contest:
        made = _task_vectors(method, base, adapters, scales, **parameters)
        for candidate in made.candidates:
            candidate.recipe["output"] = "full"
            candidate.recipe["name"] = f"{method} of {listed(made.tasks)}"
        return replace(made, note=f"of adapters of rank {ADAPTER_RANK} taken out of the experts")

    return [
        contest("geomerge", MEAN_SCALES),
        contest("knots_ties", SCALES, density=DENSITY),
    ]


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _task_vectors(
    method: str,
    base: Path,
    experts: Mapping[str, Path],
    scales: Sequence[float] = SCALES,
    **parameters: float,
) -> Contest:
    return Contest(
        method,
        tuple(experts),
        tuple(
            Candidate(
                f"λ={scale:g}",
                {
                    "merge_method": method,
                    "base_model": str(base),
                    "models": [
                        {"model": str(path), "parameters": {"weight": 1.0, **parameters}}
                        for path in experts.values()
                    ],
                    "parameters": {"lambda": scale},
                },
            )
            for scale in scales
        ),
    )


def _linear(folders: Sequence[str]) -> Recipe:
    return {
        "merge_method": "linear",
        "models": [{"model": path, "parameters": {"weight": 1.0}} for path in folders],
    }


def _slerp(start: str, end: str, t: float) -> Recipe:
    return {
        "merge_method": "slerp",
        "base_model": start,
        "models": [{"model": start}, {"model": end}],
        "parameters": {"t": t},
    }


def _passthrough(folder: str) -> Recipe:
    return {"merge_method": "passthrough", "models": [{"model": folder}]}
