"""Choosing a scale, and perhaps a density, on validation: the same number of tries for everybody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """Values that a merge is tried with.

    Attributes:
        scale: What multiplies the merged update.
        density: Share of entries that a sparse method keeps; None for other methods.
    """

    scale: float = 1.0
    density: float | None = None

    def __str__(self) -> str:
        """For people, such as ``λ=0.707, density 0.2``."""
        density = "" if self.density is None else f", density {self.density:g}"
        return f"λ={self.scale:.3g}{density}"


@dataclass(frozen=True)
class Tuned:
    """What was tried and what came out best.

    Attributes:
        best: The trial with the highest score, the first of equals.
        scores: By trial, in the order of trying.
    """

    best: Trial
    scores: dict[Trial, float]

    @property
    def at_edge(self) -> bool:
        """Whether tries ran out while the scale was still growing or shrinking."""
        scales = [trial.scale for trial in self.scores]
        return len(scales) > 1 and self.best.scale in (min(scales), max(scales))


def tune(score: Callable[[Trial], float], *, tries: int, densities: Sequence[float] = ()) -> Tuned:
    """Climb along the scale, then try the other densities at the best scale.

    The scale moves by factors of two from 1 until both neighbours are worse, then by factors of
    √2 and less. So every method finds its own order of magnitude, and no grid favours those whose
    results happen to have the right length.

    Args:
        score: To be maximised.
        tries: How often it may be called; at least the number of densities, and one.
        densities: Those to try; the climb is done at the first.

    Returns:
        The trials, exactly `tries` of them.
    """
    scores: dict[Trial, float] = {}
    density = densities[0] if densities else None
    others = densities[1:]
    step = 1.0
    exponents: dict[float, float] = {}
    while len(exponents) < tries - len(others):
        best = max(exponents, key=exponents.__getitem__, default=0.0)
        new = next((e for e in (best, best + step, best - step) if e not in exponents), None)
        if new is None:
            step /= 2
            continue
        trial = Trial(2.0**new, density)
        exponents[new] = scores[trial] = score(trial)
    scale = max(scores, key=scores.__getitem__).scale
    for other in others:
        trial = Trial(scale, other)
        scores[trial] = score(trial)
    return Tuned(max(scores, key=scores.__getitem__), scores)
