"""The output folder: nothing that is not ours is touched, nothing of ours is lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

import isthmus
from isthmus.engine.verify import verify
from isthmus.errors import (
    NonFiniteError,
    OutputError,
    PlanError,
)

from .models import contents, recipe, refused, write_model


def test_a_folder_that_is_not_ours_is_never_touched(ties, tmp_path):
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    for options in ({}, {"overwrite": True}, {"resume": True}):
        message = refused(ties, out, OutputError, **options)
        assert "thesis.tex" in message
    assert contents(out) == {"thesis.tex": b"years of work"}


def test_files_added_to_our_folder_are_never_touched(ties, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    (out / "notes.txt").write_text("mine")
    before = contents(out)
    with pytest.raises(OutputError, match=r"notes\.txt"):
        isthmus.merge(ties, out, overwrite=True)
    assert contents(out) == before


def test_an_output_of_ours_is_replaced_only_when_asked(ties, models, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out, max_shard_size=4000)
    before = contents(out)
    with pytest.raises(OutputError, match="--overwrite"):
        isthmus.merge(ties, out)
    assert contents(out) == before
    isthmus.merge(recipe("linear", models[1:]), out, overwrite=True)
    after = contents(out)
    assert "model.safetensors" in after
    assert not [name for name in after if "-of-" in name or "index" in name]
    assert verify(out).problems == ()


def test_a_failing_overwrite_leaves_the_old_output_whole(ties, models, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    before = contents(out)
    state = load_file(models[1] / "model.safetensors")
    state["model.norm.weight"][0] = float("nan")
    write_model(models[1], state)
    with pytest.raises(NonFiniteError):
        isthmus.merge(ties, out, overwrite=True)
    after = contents(out)
    assert {name: after[name] for name in before} == before


def test_a_file_in_the_way(ties, tmp_path):
    out = tmp_path / "out"
    out.write_text("a file")
    with pytest.raises(OutputError, match="is a file"):
        isthmus.merge(ties, out)
    assert out.read_text() == "a file"


def test_an_output_over_an_input(models):
    with pytest.raises(PlanError, match="input"):
        isthmus.merge(recipe("linear", models[1:]), models[1], overwrite=True)
    with pytest.raises(PlanError, match="input"):
        isthmus.merge(recipe("linear", models[1:]), models[1].parent)
    load_file(models[1] / "model.safetensors")


def test_a_read_only_place(ties, tmp_path, monkeypatch):
    """The superuser may write anywhere, so the system's answer is put in its mouth."""

    def forbidden(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", forbidden)
    message = refused(ties, tmp_path / "out", OutputError)
    assert "Permission denied" in message
    assert "out" in message


def test_a_disk_too_small_is_found_before_anything_is_written(ties, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    message = refused(ties, tmp_path / "out", PlanError)
    assert "100" in message
    monkeypatch.undo()
    isthmus.merge(ties, tmp_path / "out", resume=True)


def test_a_disk_that_fills_up_leaves_a_resumable_state(ties, tmp_path, monkeypatch):
    isthmus.merge(ties, tmp_path / "calm" / "out")
    real, calls = os.pwrite, iter(range(1_000_000))

    def full(*arguments):
        if next(calls) > 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    out = tmp_path / "hit" / "out"
    monkeypatch.setattr(os, "pwrite", full)
    message = refused(ties, out, OutputError, workers=1)
    assert "full" in message
    monkeypatch.undo()
    with pytest.raises(OutputError, match="--resume"):
        isthmus.merge(ties, out)
    outcome = isthmus.merge(ties, out, resume=True)
    assert outcome.resumed > 0
    assert contents(out) == contents(tmp_path / "calm" / "out")


@pytest.mark.parametrize("name", ["../victim.txt", "/etc/passwd", "", ".", "a\0b", "x" * 300])
def test_a_manifest_with_names_that_lead_outside_is_refused(ties, tmp_path, name):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    manifest = json.loads((out / "isthmus-manifest.json").read_text())
    manifest["files"][name] = {"size": 1, "xxh3": "0"}
    (out / "isthmus-manifest.json").write_text(json.dumps(manifest))
    victim = tmp_path / "victim.txt"
    victim.write_text("keep me")
    with pytest.raises(OutputError, match="outside"):
        verify(out)
    with pytest.raises(OutputError):
        isthmus.merge(ties, out, overwrite=True)
    assert victim.read_text() == "keep me"


def test_a_manifest_that_lists_a_tensor_too_many(ties, tmp_path):
    out = tmp_path / "out"
    isthmus.merge(ties, out)
    manifest = json.loads((out / "isthmus-manifest.json").read_text())
    manifest["files"]["model.safetensors"]["tensors"]["ghost"] = "0"
    (out / "isthmus-manifest.json").write_text(json.dumps(manifest))
    assert any("ghost" in problem for problem in verify(out).problems)
