"""Activations between blocks."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import pytest
import torch

from isthmus.errors import CalibrationError
from isthmus.models.states import Keep, States


def hidden(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("keep", list(Keep))
def test_what_is_put_in_comes_out(keep):
    states = States(keep)
    given = [hidden(2, 3, 4), hidden(1, 5, 4, seed=1)]
    for one in given:
        states.append(one)
    states[0] = given[0] = hidden(2, 3, 4, seed=2)
    states[1] = given[1] = hidden(3, 2, 4, seed=3)
    for index, one in enumerate(given):
        assert states[index].dtype == torch.float32
        expected = one.bfloat16().float() if keep is Keep.BFLOAT16 else one
        assert torch.equal(states[index], expected)


def test_files_are_on_disk_and_go_with_the_states(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    states = States(Keep.DISK)
    states.append(hidden(10, 100))
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert file.stat().st_size == 4000
    del states
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    states = States(Keep.DISK)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(CalibrationError, match=r"No space left on device(.|\n)*TMPDIR"):
        states.append(hidden(3))
