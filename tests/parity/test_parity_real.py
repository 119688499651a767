"""Two real fine-tunings of a real encoder, read from torch's files."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from measurements import Measurements
from peer import Mergekit
from safetensors.numpy import load_file
from tensors import worst_difference

import isthmus

pytestmark = pytest.mark.parity

TOLERANCE = 1e-6
DENSITY = 0.3
NAMES = ("bert_pretrained", "bert_ft", "bert_ft_10k_25s")

LINEAR = {"merge_method": "linear", "parameters": {"weight": 0.5}}
TASK_ARITHMETIC = {"merge_method": "task_arithmetic", "parameters": {"weight": 0.7, "lambda": 0.8}}
TIES = {"merge_method": "ties", "parameters": {"weight": 1, "density": DENSITY}}
SLERP = {"merge_method": "slerp", "parameters": {"t": 0.4}}
PASSTHROUGH = {"merge_method": "passthrough", "parameters": {"scale": 0.5}}


@pytest.fixture(scope="module")
def encoders() -> list[Path]:
    spec = find_spec("rxnfp")
    if spec is None or not spec.submodule_search_locations:
        pytest.fail(
            "the package rxnfp, which carries the models, is missing: make setup installs it"
        )
    folder = Path(spec.submodule_search_locations[0]) / "models" / "transformers"
    return [folder / name for name in NAMES]


@pytest.fixture(scope="module")
def states(encoders: list[Path]) -> list[dict[str, torch.Tensor]]:
    """Their weights, all under the base's names: one expert was saved without the prefix."""
    base, *experts = (
        torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
        for folder in encoders
    )
    return [
        base,
        *(
            {name if name in base else f"bert.{name}": value for name, value in state.items()}
            for state in experts
        ),
    ]


@pytest.fixture(scope="module")
def files(
    states: list[dict[str, torch.Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    """The same weights as mergekit needs them: it does not match names across prefixes."""
    folder = tmp_path_factory.mktemp("encoders")
    paths = [folder / f"{name}.bin" for name in NAMES]
    for path, state in zip(paths, states, strict=True):
        torch.save(state, path)
    return paths


@pytest.mark.parametrize(
    "what",
    [LINEAR, TASK_ARITHMETIC, TIES, SLERP, PASSTHROUGH],
    ids=lambda what: what["merge_method"],
)
def test_same_numbers_as_mergekit_on_real_fine_tunings(
    what: dict[str, Any],
    mergekit: Mergekit,
    encoders: list[Path],
    files: list[Path],
    states: list[dict[str, torch.Tensor]],
    measurements: Measurements,
    tmp_path: Path,
) -> None:
    def recipe(models: list[Path], **more: str) -> Path:
        base, *experts = map(str, models)
        listed = {"slerp": [base, experts[0]], "passthrough": [experts[0]]}.get(
            what["merge_method"], experts
        )
        content = (
            what | {"models": [{"model": model} for model in listed], "dtype": "float32"} | more
        )
        if what["merge_method"] not in ("linear", "passthrough"):
            content["base_model"] = base
        path = tmp_path / f"{models[0].name}.yaml"
        path.write_text(yaml.safe_dump(content), encoding="utf-8")
        return path

    isthmus.merge(recipe(encoders, tensors="common"), tmp_path / "ours")
    mergekit.ask("files", recipe=recipe(files), out=tmp_path / "theirs")

    ours = load_file(tmp_path / "ours" / "model.safetensors")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    # Without a base the donor, hence the prefix, is that of the first expert.
    ours = {name if name in theirs else f"bert.{name}": value for name, value in ours.items()}
    assert theirs
    assert theirs.keys() <= ours.keys()
    if what is TIES:
        tied = tied_entries(states, theirs)
        for name, mask in tied.items():
            ours[name] = np.where(mask, theirs[name], ours[name])
        measurements.excluded_ties = {
            "model": "rxnfp",
            "entries": int(sum(mask.sum() for mask in tied.values())),
            "of": int(sum(mask.size for mask in tied.values())),
        }
    difference = worst_difference(ours, theirs)
    measurements.add(what["merge_method"], "rxnfp", "real fine-tunings", difference, len(theirs))
    assert difference <= TOLERANCE


def tied_entries(
    states: list[dict[str, torch.Tensor]], names: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Where an expert's delta is as large as the smallest that is kept, and so is a dropped one.

    Isthmus keeps all of these entries; mergekit as many as fill up the density, in the order of
    its sorting.
    """
    base, *experts = states
    tied = {}
    for name in names:
        mask = np.zeros(base[name].shape, bool)
        for state in experts:
            magnitudes = (state[name] - base[name]).abs().numpy()
            rank = max(1, int(DENSITY * magnitudes.size))
            threshold = np.sort(magnitudes, axis=None)[-rank]
            if threshold > 0 and (magnitudes >= threshold).sum() > rank:
                mask |= magnitudes == threshold
        tied[name] = mask
    return tied
