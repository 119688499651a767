"""Merges that are stopped, killed or run twice, and go on in the same bytes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from safetensors.torch import load_file

import isthmus
from isthmus.engine.verify import verify
from isthmus.errors import (
    NonFiniteError,
    OutputError,
    PlanError,
)

from .models import contents, recipe, refused, write_model


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A merge that takes a second or so, as a recipe file."""
    root = tmp_path_factory.mktemp("large")
    draw = torch.Generator().manual_seed(0)
    shapes = {f"layers.{i}.weight": (1024, 1024) for i in range(24)}
    paths = [
        write_model(root / f"m{n}", {k: torch.randn(s, generator=draw) for k, s in shapes.items()})
        for n in range(3)
    ]
    content = recipe("dare_ties", paths[1:], paths[0], parameters={"density": 0.5})
    (root / "recipe.yaml").write_text(yaml.safe_dump(content))
    isthmus.merge(content, root / "calm" / "out")
    return root


def start(large, out, *options):
    command = [sys.executable, "-m", "isthmus", "merge", large / "recipe.yaml", out, *options]
    return subprocess.Popen(
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_the_first_tensors(process, out):
    journal = out / ".isthmus" / "journal.jsonl"
    for _ in range(4000):
        if process.poll() is not None or (journal.exists() and journal.stat().st_size > 300):
            return
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_polite_stop_says_how_to_go_on(large, tmp_path, name):
    out = tmp_path / "out"
    process = start(large, out, "--workers", "2")
    wait_for_the_first_tensors(process, out)
    process.send_signal(getattr(signal, name))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "--resume" in errors
    assert not list(out.glob("*.safetensors"))
    with pytest.raises(OutputError, match="--resume"):
        isthmus.merge(large / "recipe.yaml", out)
    outcome = isthmus.merge(large / "recipe.yaml", out, resume=True)
    assert 0 < outcome.resumed < 24
    assert contents(out) == contents(large / "calm" / "out")


@pytest.mark.slow
def test_two_merges_into_one_folder(large, tmp_path):
    out = tmp_path / "out"
    process = start(large, out, "--workers", "1")
    wait_for_the_first_tensors(process, out)
    with pytest.raises(OutputError, match="another merge"):
        isthmus.merge(large / "recipe.yaml", out, resume=True)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert contents(out) == contents(large / "calm" / "out")


def test_resuming_with_another_recipe_or_changed_inputs_is_refused(
    ties, models, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    monkeypatch.setattr(
        os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "broken"))
    )
    with pytest.raises(OutputError):
        isthmus.merge(ties, out)
    monkeypatch.undo()
    with pytest.raises(OutputError, match="another recipe"):
        isthmus.merge(ties | {"seed": 9}, out, resume=True)
    file = models[1] / "model.safetensors"
    os.utime(file, ns=(1, 1))
    with pytest.raises(OutputError, match="other inputs"):
        isthmus.merge(ties, out, resume=True)
    isthmus.merge(ties, out, overwrite=True)
    assert verify(out).problems == ()


def test_a_tensor_that_rotted_since_the_interruption_is_merged_again(ties, tmp_path, monkeypatch):
    isthmus.merge(ties, tmp_path / "calm" / "out")
    out = tmp_path / "hit" / "out"
    from isthmus.engine import run as run_module

    monkeypatch.setattr(
        run_module, "_write_rest", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        isthmus.merge(ties, out)
    monkeypatch.undo()
    staged = out / ".isthmus" / "files" / "model.safetensors"
    content = bytearray(staged.read_bytes())
    content[-5] ^= 255
    staged.write_bytes(content)
    journal = out / ".isthmus" / "journal.jsonl"
    journal.write_text(journal.read_text() + '{"tensors": {"half a li')
    tensors = len(load_file(tmp_path / "calm" / "out" / "model.safetensors"))
    assert isthmus.merge(ties, out, resume=True).resumed == tensors - 1
    assert contents(out) == contents(tmp_path / "calm" / "out")


@pytest.mark.parametrize("after", range(8))
def test_a_crash_while_files_move_into_place_is_completed(
    ties, models, tmp_path, monkeypatch, after
):
    """Every number of moves done, from none to all but the clean-up."""
    isthmus.merge(ties, tmp_path / "calm" / "out", max_shard_size=8000)
    out = tmp_path / "hit" / "out"
    isthmus.merge(recipe("linear", models[1:]), out)
    from pathlib import Path

    real, left = Path.replace, [after]

    def dying(self, target):
        if ".isthmus" in str(self) and ".isthmus" not in str(target):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "replace", dying)
    try:
        isthmus.merge(ties, out, overwrite=True, max_shard_size=8000)
    except KeyboardInterrupt:
        monkeypatch.undo()
        with pytest.raises(OutputError, match="--resume"):
            isthmus.merge(ties, out, max_shard_size=8000)
        isthmus.merge(ties, out, resume=True, max_shard_size=8000)
    assert contents(out) == contents(tmp_path / "calm" / "out")


def test_resuming_never_replaces_another_finished_merge(ties, models, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    before = contents(out)
    for other in (recipe("linear", models[1:]), ties | {"seed": 1}):
        with pytest.raises(OutputError, match="--overwrite"):
            isthmus.merge(other, out, resume=True)
    with pytest.raises(OutputError, match="other options"):
        isthmus.merge(ties, out, resume=True, max_shard_size=4000)
    with pytest.raises(PlanError, match="exclude"):
        isthmus.merge(ties, out, resume=True, overwrite=True)
    assert contents(out) == before


def test_resuming_a_finished_merge_notices_new_inputs_and_damage(ties, models, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    (out / "config.json").unlink()
    with pytest.raises(OutputError, match=r"config\.json is missing"):
        isthmus.merge(ties, out, resume=True)
    isthmus.merge(ties, out, overwrite=True)
    write_model(models[1], load_file(models[2] / "model.safetensors"))  # of the same size
    with pytest.raises(OutputError, match="other inputs"):
        isthmus.merge(ties, out, resume=True)


def test_allowing_nonfinite_numbers_on_resume(ties, models, tmp_path):
    state = load_file(models[1] / "model.safetensors")
    state["model.norm.weight"][0] = float("nan")
    write_model(models[1], state)
    with pytest.raises(NonFiniteError):
        isthmus.merge(ties, tmp_path / "out", workers=1)
    outcome = isthmus.merge(ties, tmp_path / "out", resume=True, allow_nonfinite=True)
    assert outcome.resumed > 0


def test_remains_of_a_removed_work_folder_are_no_obstacle(ties, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    (out / ".isthmus-done").mkdir()
    (out / ".isthmus-done" / "state.json").write_text("{")
    assert verify(out).problems == ()
    isthmus.merge(ties, out, resume=True)
    isthmus.merge(ties, out, overwrite=True)
    assert not (out / ".isthmus-done").exists()


def test_a_failed_overwrite_leaves_a_merge_that_verifies(ties, models, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    state = load_file(models[1] / "model.safetensors")
    state["model.norm.weight"][0] = float("nan")
    write_model(models[1], state)
    with pytest.raises(NonFiniteError):
        isthmus.merge(ties, out, overwrite=True)
    assert verify(out).problems == ()


def test_a_full_disk_under_the_journal(ties, tmp_path, monkeypatch):
    from isthmus.engine.journal import Journal

    class Full:
        name = "journal.jsonl"

        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    real = Journal.__init__

    def broken(self, path):
        real(self, path)
        self._file.close()
        self._file = Full()

    monkeypatch.setattr(Journal, "__init__", broken)
    message = refused(ties, tmp_path / "out", OutputError)
    assert "No space left" in message
    monkeypatch.undo()
    isthmus.merge(ties, tmp_path / "out", resume=True)


def test_resuming_a_finished_merge_changes_nothing(ties, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    before = {name: (out / name).stat().st_mtime_ns for name in contents(out)}
    outcome = isthmus.merge(ties, out, resume=True)
    assert outcome.resumed == outcome.merged + outcome.carried
    assert {name: (out / name).stat().st_mtime_ns for name in contents(out)} == before
