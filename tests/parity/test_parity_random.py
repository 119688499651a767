"""The random methods: other draws than mergekit's, of the same distribution."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from measurements import Measurements
from peer import Mergekit

import isthmus

pytestmark = pytest.mark.parity

SEEDS = 400
ENTRIES = (64, 64)
WEIGHTS = (0.7, 1.0, -0.4)

# With 4,096 entries and a true difference of zero, the root mean square of the z-scores is
# 1 ± 0.011 (the entries of one merge are nearly independent; the common ℓ1 factor is not, which
# widens this a little), and the largest of them is about 4. A bias of a tenth of a standard
# deviation in every entry would raise the root mean square to 1.73.
Z_RMS = 1.1
Z_MAX = 6.0
# The total variance is a sum over all entries; its relative error over 400 seeds is below 1 %.
VARIANCE_RATIO = 0.03


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
@pytest.mark.parametrize("density", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("rescale", [True, False], ids=["rescaled", "not rescaled"])
def test_same_mean_and_variance_as_mergekit(
    method: str,
    density: float,
    rescale: bool,
    mergekit: Mergekit,
    measurements: Measurements,
    tmp_path: Path,
) -> None:
    random = np.random.default_rng(3)
    base = random.standard_normal(ENTRIES, np.float32)
    deltas = 0.1 * random.standard_normal((len(WEIGHTS), *ENTRIES), np.float32)
    experts = base + deltas
    np.savez(tmp_path / "in.npz", base=base, experts=experts, weights=WEIGHTS)

    mergekit.ask(
        "draw",
        method=method,
        inputs=tmp_path / "in.npz",
        out=tmp_path / "out.npy",
        density=density,
        rescale=rescale,
        count=SEEDS,
    )
    theirs = np.load(tmp_path / "out.npy") - base
    names = [f"expert-{k}" for k in range(len(WEIGHTS))]
    ours = np.stack(
        [
            isthmus.merge_state_dicts(
                {n: {"w": torch.from_numpy(e)} for n, e in zip(names, experts, strict=True)},
                base={"w": torch.from_numpy(base)},
                method=method,
                seed=seed,
                weight=dict(zip(names, WEIGHTS, strict=True)),
                density=density,
                rescale=rescale,
            )["w"].numpy()
            - base
            for seed in range(SEEDS)
        ]
    )

    variances = [drawn.var(axis=0, ddof=1, dtype=np.float64) for drawn in (ours, theirs)]
    means = [drawn.mean(axis=0, dtype=np.float64) for drawn in (ours, theirs)]
    z = (means[0] - means[1]) / np.sqrt(sum(variances) / SEEDS)
    z_rms, z_max = float(np.sqrt(np.mean(z**2))), float(np.abs(z).max())
    ratio = float(variances[0].sum() / variances[1].sum())
    measurements.random[f"{method}, density {density}, {'l1' if rescale else 'no'} rescale"] = {
        "seeds": SEEDS,
        "entries": base.size,
        "z_rms": round(z_rms, 4),
        "z_max": round(z_max, 3),
        "variance_ratio": round(ratio, 5),
    }
    assert z_rms < Z_RMS
    assert z_max < Z_MAX
    assert abs(ratio - 1) < VARIANCE_RATIO
