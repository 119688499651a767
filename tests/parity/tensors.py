"""Comparing two state dicts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def worst_difference(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> float:
    """The largest absolute difference over all tensors of `theirs`, in float64."""
    assert all(ours[name].shape == value.shape for name, value in theirs.items())
    return max(
        float(np.abs(ours[name].astype(np.float64) - value).max()) for name, value in theirs.items()
    )
