"""Confidence intervals from a few independent pairs: of means, and of a ratio of means (Fieller)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]


def mean_interval(values: Sequence[float], level: float) -> Interval:
    """Student's interval for the mean of independent values, two at least."""
    numbers = np.asarray(values, np.float64)
    reach = _quantile(len(numbers), level) * numbers.std(ddof=1) / math.sqrt(len(numbers))
    return float(numbers.mean() - reach), float(numbers.mean() + reach)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], level: float
) -> Interval:
    """Fieller's interval for E[numerator]/E[denominator], where both are known to be positive.

    It holds the ratios ρ for which the mean of numerator − ρ·denominator is not significantly different
    from 0 (Fieller 1954): a quadratic inequality. Where the denominator is not significantly different from
    0 the interval has no upper end, and where it is negative it tells nothing: [0, ∞].

    Args:
        numerators: Independent of each other, two at least.
        denominators: The other halves of the pairs.
        level: Such as 0.95.

    Returns:
        Lower and upper end, within [0, ∞].
    """
    pairs = np.stack([np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)])
    top, bottom = (float(mean) for mean in pairs.mean(axis=1))
    (top_variance, mixed), (_, bottom_variance) = (np.cov(pairs) / pairs.shape[1]).tolist()
    reach = _quantile(pairs.shape[1], level) ** 2
    # aρ² − 2bρ + c ≤ 0
    a = bottom**2 - reach * bottom_variance
    b = top * bottom - reach * mixed
    c = top**2 - reach * top_variance
    discriminant = b**2 - a * c
    if a > 0 and bottom > 0:
        root = math.sqrt(max(discriminant, 0.0))
        return max((b - root) / a, 0.0), (b + root) / a
    if a >= 0 or c <= 0:
        return 0.0, math.inf
    # a < 0 < c: the roots have different signs, and all beyond the positive one is in.
    return (b - math.sqrt(discriminant)) / a, math.inf


def _quantile(count: int, level: float) -> float:
    from scipy.stats import t

    return float(t.ppf((1 + level) / 2, count - 1))
