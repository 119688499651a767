from __future__ import annotations

import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from isthmus.lab.cache import content_key, is_made, make_folder, one_at_a_time
from isthmus.lab.heads import Head

SETTINGS = {"rate": 0.1, "seed": 0}


def fill(folder):
    (folder / "weights").write_text("good")


def test_a_made_folder_is_recognised_by_its_settings(tmp_path):
    folder = tmp_path / "expert"
    assert not is_made(folder, SETTINGS)
    make_folder(folder, SETTINGS, fill)
    assert is_made(folder, {"seed": 0, "rate": 0.1})
    assert not is_made(folder, {**SETTINGS, "seed": 1})
    assert (folder / "weights").read_text() == "good"


def test_a_failure_half_way_leaves_no_folder(tmp_path):
    folder = tmp_path / "expert"

    def fail(partial):
        fill(partial)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        make_folder(folder, SETTINGS, fail)
    assert not folder.exists()
    make_folder(folder, SETTINGS, fill)
    assert [path.name for path in tmp_path.iterdir()] == ["expert"]


def test_a_failure_keeps_the_folder_of_before(tmp_path):
    folder = tmp_path / "expert"
    make_folder(folder, SETTINGS, fill)

    def fail(_):
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        make_folder(folder, {"seed": 1}, fail)
    assert is_made(folder, SETTINGS)


def test_new_settings_replace_every_file_of_before(tmp_path):
    folder = tmp_path / "expert"
    make_folder(folder, SETTINGS, fill)
    make_folder(folder, {"seed": 1}, lambda partial: (partial / "other").touch())
    assert not (folder / "weights").exists()
    assert not is_made(folder, SETTINGS)


def test_others_may_read_what_was_made(tmp_path):
    def fill_privately(partial):
        (partial / "sub").mkdir()
        for path in (partial / "weights", partial / "sub" / "weights"):
            path.touch(0o600)

    before = os.umask(0o027)
    try:
        make_folder(tmp_path / "expert", SETTINGS, fill_privately)
        Head(torch.randn(2, 5), torch.randn(2)).save(tmp_path / "heads" / "a.safetensors", "key")
    finally:
        os.umask(before)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}
    assert sorted(path.name for path in files) == [
        "a.safetensors",
        "made_from.json",
        "weights",
        "weights",
    ]


@pytest.mark.parametrize("record", ["", "[]", "{}", '{"key": 1}'])
def test_a_broken_record_does_not_count(tmp_path, record):
    (tmp_path / "made_from.json").write_text(record)
    assert not is_made(tmp_path, SETTINGS)


def test_a_head_comes_back_only_for_its_key(tmp_path):
    path = tmp_path / "heads" / "movies.safetensors"
    key = content_key(SETTINGS)
    assert Head.load(path, key) is None
    head = Head(torch.randn(2, 5), torch.randn(2))
    head.save(path, key)
    back = Head.load(path, key)
    assert back is not None
    assert torch.equal(back.weight, head.weight)
    assert torch.equal(back.bias, head.bias)
    assert Head.load(path, content_key({"seed": 1})) is None


def test_makers_of_one_folder_wait_for_each_other(tmp_path):
    folder = tmp_path / "new" / "expert"
    made = []

    def slow(partial):
        made.append(partial)
        fill(partial)
        time.sleep(0.1)

    def make(_):
        with one_at_a_time(folder):
            if not is_made(folder, SETTINGS):
                make_folder(folder, SETTINGS, slow)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(make, range(4)))
    assert len(made) == 1
    assert is_made(folder, SETTINGS)
