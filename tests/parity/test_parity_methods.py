"""The methods without chance: the same numbers as mergekit, on five architectures."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from cases import CASES, Case
from measurements import Measurements
from peer import Mergekit
from safetensors.numpy import load_file
from tensors import worst_difference

import isthmus

pytestmark = pytest.mark.parity

TOLERANCE = 1e-6
"""On weights of magnitude about one in float32, whose spacing there is 1.2e-7."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_same_numbers_as_mergekit(
    case: Case,
    mergekit: Mergekit,
    family: tuple[str, list[Path]],
    measurements: Measurements,
    tmp_path: Path,
) -> None:
    architecture, folders = family
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(case.recipe(folders), sort_keys=False), encoding="utf-8")

    isthmus.merge(recipe, tmp_path / "ours")
    mergekit.ask("folders", recipe=recipe, out=tmp_path / "theirs")

    ours, theirs = (
        load_file(tmp_path / which / "model.safetensors") for which in ("ours", "theirs")
    )
    assert ours.keys() == theirs.keys()
    difference = worst_difference(ours, theirs)
    measurements.add(case.method, architecture, case.what, difference, len(ours))
    assert difference <= TOLERANCE
