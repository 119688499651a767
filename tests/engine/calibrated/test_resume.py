"""Interrupted merges on calibration data go on and end in the same bytes."""

from __future__ import annotations

import json
import shutil

import pytest

import isthmus
from isthmus.errors import IsthmusError

from .models import recipe


def interrupted_at(number: int, monkeypatch) -> list[int]:
    """Ctrl-C when so many layers are to be kept, and never after; how many there were, as they come."""
    from isthmus.models.solved import SolvedLayers

    add, count = SolvedLayers.add, [0]

    def failing(self, *arguments):
        count[0] += 1
        if count[0] == number:
            raise KeyboardInterrupt
        add(self, *arguments)

    monkeypatch.setattr(SolvedLayers, "add", failing)
    return count


def test_an_interrupted_merge_goes_on_and_ends_in_the_same_bytes(family, tmp_path, monkeypatch):
    made = recipe(family) | {"name": "same"}
    isthmus.merge(made, tmp_path / "whole")

    count = interrupted_at(6, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        isthmus.merge(made, tmp_path / "out")
    counted = count[0]
    with pytest.raises(IsthmusError, match="interrupted merge"):
        isthmus.merge(made, tmp_path / "out")
    isthmus.merge(made, tmp_path / "out", resume=True)
    layers = len(json.loads((tmp_path / "out" / "projection.json").read_text())["layers"])
    assert count[0] - counted == layers - 5  # what was solved is not solved again
    for file in ("model.safetensors", "projection.json", "README.md"):
        ours, theirs = (tmp_path / folder / file for folder in ("out", "whole"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_spoilt_layers_of_an_interrupted_merge_are_made_anew(family, tmp_path, monkeypatch):
    made = recipe(family) | {"name": "same"}
    isthmus.merge(made, tmp_path / "whole")

    interrupted_at(6, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        isthmus.merge(made, tmp_path / "out")
    folder = tmp_path / "out" / ".isthmus" / "layers"
    cut, broken, *_ = sorted(folder.glob("*.safetensors"))
    cut.write_bytes(cut.read_bytes()[:-10])
    broken.with_suffix(".json").write_text("{")
    isthmus.merge(made, tmp_path / "out", resume=True)
    for file in ("model.safetensors", "projection.json"):
        ours, theirs = (tmp_path / name / file for name in ("out", "whole"))
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("content", [None, "{", '{"coefficients": 3}'])
def test_coefficients_of_the_network_are_kept_unless_spoilt(content, family, tmp_path, monkeypatch):
    made = recipe(family, objective="network", basis="scalar", sweeps=1) | {"name": "same"}
    isthmus.merge(made, tmp_path / "whole")

    from isthmus.engine.network_stage import NetworkStage
    from isthmus.engine.worker import Worker

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Worker, "make", interrupted)
        with pytest.raises(KeyboardInterrupt):
            isthmus.merge(made, tmp_path / "out")
    kept = tmp_path / "out" / ".isthmus" / "layers" / "network.json"
    if content is None:
        monkeypatch.setattr(NetworkStage, "_found", interrupted)
    else:
        kept.write_text(content)
    isthmus.merge(made, tmp_path / "out", resume=True)
    for file in ("model.safetensors", "projection.json"):
        ours, theirs = (tmp_path / name / file for name in ("out", "whole"))
        assert ours.read_bytes() == theirs.read_bytes()


def test_other_examples_are_another_merge(family, tmp_path, monkeypatch):
    made = recipe(family)
    shutil.copy(family / "one.jsonl", tmp_path / "one.jsonl")
    made["models"][0]["calibration"] = str(tmp_path / "one.jsonl")

    from isthmus.models.solved import SolvedLayers

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(SolvedLayers, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        isthmus.merge(made, tmp_path / "out")
    shutil.copy(family / "two.jsonl", tmp_path / "one.jsonl")
    with pytest.raises(IsthmusError, match="other inputs"):
        isthmus.merge(made, tmp_path / "out", resume=True)
