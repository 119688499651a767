"""Where mergekit 0.1.5 and Isthmus differ on purpose: the documentation says so, and this checks it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from peer import Mergekit
from safetensors.numpy import load_file, save_file

import isthmus

pytestmark = pytest.mark.parity


@pytest.fixture
def merged(tmp_path: Path, mergekit: Mergekit) -> Any:
    """Merges two small files with both tools."""
    base = np.zeros(8, np.float32)
    one = np.array([4, 3, 2, 2, -2, 1, 0.5, 0.25], np.float32)
    two = np.array([-1, 3, 2, 0.5, -2, 4, 0.125, 8], np.float32)
    paths = [tmp_path / f"{name}.safetensors" for name in ("base", "one", "two")]
    for path, values in zip(paths, (base, one, two), strict=True):
        save_file({"w": values}, path)

    def merge(method: str, **parameters: Any) -> tuple[np.ndarray, np.ndarray]:
        recipe = tmp_path / "recipe.yaml"
        content = {
            "merge_method": method,
            "base_model": str(paths[0]),
            "models": [{"model": str(path)} for path in paths[1:]],
            "parameters": parameters,
            "dtype": "float32",
        }
        recipe.write_text(yaml.safe_dump(content), encoding="utf-8")
        isthmus.merge(recipe, tmp_path / "ours", overwrite=True)
        mergekit.ask("files", recipe=recipe, out=tmp_path / "theirs")
        return tuple(
            load_file(tmp_path / which / "model.safetensors")["w"] for which in ("ours", "theirs")
        )

    return merge


def test_equal_magnitudes_at_the_threshold_stay_here_and_are_cut_there(merged: Any) -> None:
    # Three entries of each are needed; the third largest magnitude occurs three times in the
    # first model: |2|, |2|, |-2|.
    ours, theirs = merged("ties", weight=1, density=0.375, normalize=False)
    assert np.count_nonzero(ours) > np.count_nonzero(theirs)


def test_density_of_task_arithmetic_is_ignored_by_both(merged: Any) -> None:
    ours, theirs = merged("task_arithmetic", weight=1, density=0.25)
    whole, theirs_whole = merged("task_arithmetic", weight=1)
    np.testing.assert_array_equal(theirs, theirs_whole)
    np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_array_equal(whole, theirs)
