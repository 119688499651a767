"""Whether captured energy foretells accuracy: rank correlation over many merges."""

from __future__ import annotations

from collections.abc import Sequence


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation of two series, equal values at their mean rank.

    Returns:
        Between -1 and 1; NaN where all values of a series are equal.
    """
    from scipy.stats import rankdata

    a, b = (rankdata(values) - (len(values) + 1) / 2 for values in (first, second))
    size = float((a @ a) * (b @ b)) ** 0.5
    return float(a @ b) / size if size else float("nan")
