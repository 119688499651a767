"""How far a training is from what was measured."""

from __future__ import annotations

import re
from collections.abc import Iterator

from isthmus.lab.noise.evidence import Experiment
from isthmus.models.training_settings import TrainingSettings

_ABOUT = 3
"""Networks within this factor are of about one size."""


def limits(settings: TrainingSettings, found: Experiment, *, flat: bool) -> Iterator[str]:
    """What the curve of an experiment does not say about a training, in sentences.

    Args:
        settings: Of the training.
        found: The experiment.
        flat: Whether its curve prefers no noise scale anyway.
    """
    count = "" if found.parameters is None else f", {_rounded(found.parameters)} parameters"
    yield f"Measured on a small network: {found.described}{count}. {_size(settings, found)}"
    if settings.adapter:
        yield "Yours trains an adapter; here all weights were trained. The two need not have the same best noise scale."
    yield (
        f"All trainings had {found.epochs} {'epoch' if found.epochs == 1 else 'epochs'}: at little noise they are "
        "trained less as well, which is part of the curve."
    )
    if found.optimum.interior < 0.95 and not flat:
        yield (
            f"That the best noise scale lies inside the measured range is not certain: "
            f"{100 * found.optimum.interior:.0f} % of resampled curves are higher there than at either end."
        )
    yield (
        f"At other settings of one noise scale, gains lie ±{100 * found.spread:.2f} points from the curve (root mean square)."
    )


def _size(settings: TrainingSettings, found: Experiment) -> str:
    own = _named_size(settings.model or "")
    if own is None or found.parameters is None:
        return "Yours may be larger, and its curve may lie elsewhere."
    more, fewer = own / found.parameters, found.parameters / own
    yours = f"Yours, {settings.model}, has by its name {_rounded(own)}"
    if max(more, fewer) < _ABOUT:
        return f"{yours}, which is near."
    far = f"{_rounded(more)} times as many" if more > 1 else f"{_rounded(fewer)} times fewer"
    return (
        f"{yours}, {far}: at that size nothing was measured, and where its curve lies is not known."
    )


def _named_size(name: str) -> float | None:
    """Parameters, where a name tells them: 7e9 for Qwen2.5-7B, at most 56e9 for 8x7B."""
    found = re.search(
        r"(?<![\w.])(?:(\d+)x)?(\d+(?:\.\d+)?)([MB])(?![a-z0-9])", name, re.IGNORECASE
    )
    if found is None:
        return None
    return int(found[1] or 1) * float(found[2]) * {"m": 1e6, "b": 1e9}[found[3].lower()]


def _rounded(count: float) -> str:
    for unit, word in ((1e9, " billion"), (1e6, " million")):
        if count >= unit:
            return f"{count / unit:.3g}{word}"
    return f"{count:,.0f}" if count >= 100 else f"{count:.3g}"
