"""Planned shards, written in any order, read back by the safetensors library and Transformers."""

import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.checkpoints import Dtype, ShardLayout, ShardWriter, TensorInfo, open_checkpoint
from isthmus.checkpoints.safetensors_file import SafetensorsFile
from isthmus.errors import OutputError, PlanError

from .files import numbers


def info(name: str, *shape: int, dtype: Dtype = Dtype.F32) -> TensorInfo:
    return TensorInfo(name, dtype, shape)


def write(layout: ShardLayout, folder: Path) -> None:
    """Every tensor filled with the bytes 1, 1, 1..., in two pieces, the last tensor first."""
    for shard in layout.shards:
        with ShardWriter(folder / shard.file, shard) as writer:
            for name, tensor in reversed(shard.tensors.items()):
                values = np.ones(tensor.nbytes, np.uint8).view(tensor.dtype.storage)
                half = values.size // 2
                writer.write(name, half, values[half:])
                writer.write(name, 0, values[:half])
            writer.sync()


TENSORS = st.lists(
    st.builds(
        TensorInfo,
        st.text(max_size=5).filter(lambda name: name.isprintable() and name != "__metadata__"),
        st.sampled_from(list(Dtype)),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=8,
    unique_by=lambda tensor: tensor.name,
)


@given(tensors=TENSORS, limit=st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_any_layout_reads_back(tmp_path_factory, tensors: list[TensorInfo], limit: int) -> None:
    layout = ShardLayout.plan(tensors, limit)
    assert layout == ShardLayout.plan(tensors, limit)
    folder = tmp_path_factory.mktemp("layout")
    write(layout, folder)
    placed = [name for shard in layout.shards for name in shard.tensors]
    assert sorted(placed) == sorted(tensor.name for tensor in tensors)
    for shard in layout.shards:
        path = folder / shard.file
        assert path.stat().st_size == shard.size
        assert sum(t.nbytes for t in shard.tensors.values()) <= limit or len(shard.tensors) == 1
        assert len(shard.header) % 8 == 0
        for name, tensor in shard.tensors.items():
            assert shard.positions[name] % tensor.dtype.itemsize == 0
        assert dict(SafetensorsFile(path).tensors) == dict(shard.tensors)
        with safetensors.safe_open(path, "pt") as theirs:
            assert set(theirs.keys()) == set(shard.tensors)
            for name, tensor in shard.tensors.items():
                loaded = theirs.get_tensor(name)
                assert tuple(loaded.shape) == tensor.shape
                assert loaded.dtype == getattr(torch, tensor.dtype.torch_name)
                raw = loaded.reshape(-1).view(torch.uint8)
                assert bool((raw == 1).all())
    index = layout.index()
    assert (index is None) is (len(layout.shards) == 1)
    if index is not None:
        (folder / index[0]).write_text(index[1])
        assert sorted(open_checkpoint(str(folder)).tensors) == sorted(placed)


def test_file_names_and_groups() -> None:
    tensors = [info("a", 10), info("b", 10), info("huge", 100), info("c", 5), info("d", 5)]
    layout = ShardLayout.plan(tensors, 80)
    assert [(shard.file, list(shard.tensors)) for shard in layout.shards] == [
        ("model-00001-of-00003.safetensors", ["a", "b"]),
        ("model-00002-of-00003.safetensors", ["huge"]),
        ("model-00003-of-00003.safetensors", ["c", "d"]),
    ]
    assert layout.size == sum(shard.size for shard in layout.shards)
    index = layout.index()
    assert index is not None
    assert json.loads(index[1])["metadata"] == {"total_size": 520}
    (single,) = ShardLayout.plan(tensors, 520).shards
    assert single.file == "model.safetensors"
    (nothing,) = ShardLayout.plan([], 1).shards
    assert nothing.file == "model.safetensors"


def test_ties_are_recorded_as_save_model_records_them(tmp_path: Path) -> None:
    ties = {"head": "b", "x": "nowhere", "format": "a"}
    layout = ShardLayout.plan([info("a", 10), info("b", 10)], 40, tied=ties)
    write(layout, tmp_path)
    metadata = []
    for shard in layout.shards:
        with safetensors.safe_open(tmp_path / shard.file, "np") as file:
            metadata.append(file.metadata())
    assert metadata == [{"format": "pt"}, {"format": "pt", "head": "b"}]
    index = layout.index()
    assert index is not None
    (tmp_path / index[0]).write_text(index[1])
    assert open_checkpoint(str(tmp_path)).tied == {"head": "b"}


@pytest.mark.parametrize(
    "tensors", [[info("a"), info("a")], [info("__metadata__")], [info("\ud800")]]
)
def test_names_that_cannot_be_written(tensors: list[TensorInfo]) -> None:
    with pytest.raises(PlanError):
        ShardLayout.plan(tensors, 100)


def test_transformers_loads_what_is_written(tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )  # fmt: skip
    model = BertModel(config)
    model.save_pretrained(tmp_path / "theirs")
    source = open_checkpoint(str(tmp_path / "theirs"))
    layout = ShardLayout.plan(list(source.tensors.values()), 5000)
    ours = tmp_path / "ours"
    ours.mkdir()
    for shard in layout.shards:
        with ShardWriter(ours / shard.file, shard) as writer:
            for name, tensor in shard.tensors.items():
                writer.write(name, 0, source.read_stored(name, 0, tensor.numel))
    index = layout.index()
    assert index is not None
    (ours / index[0]).write_text(index[1])
    config.save_pretrained(ours)
    loaded, report = BertModel.from_pretrained(ours, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_threads_write_at_once(tmp_path: Path) -> None:
    (shard,) = ShardLayout.plan([info("x", 100, 100), info("y", 7)], 10**9).shards
    values = np.arange(10_000, dtype=np.float32)
    writer = ShardWriter(tmp_path / "m.safetensors", shard)

    def work(first: int) -> None:
        for start in range(first * 100, 10_000, 400):
            writer.write("x", start, values[start : start + 100].reshape(10, 10))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    writer.close()
    file = SafetensorsFile(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(file.read_stored("x", 0, 10_000), values)
    assert not file.read_stored("y", 0, 7).any()


def test_an_interrupted_shard_is_taken_up_again(tmp_path: Path) -> None:
    (shard,) = ShardLayout.plan([info("x", 10)], 10**9).shards
    path = tmp_path / "m.partial"
    with ShardWriter(path, shard) as writer:
        writer.write("x", 0, np.ones(5, np.float32))
    with ShardWriter(path, shard, resume=True) as writer:
        writer.write("x", 5, np.full(5, 2, np.float32))
    assert SafetensorsFile(path).read_stored("x", 0, 10).tolist() == [1] * 5 + [2] * 5
    with ShardWriter(path, shard):
        pass
    assert not SafetensorsFile(path).read_stored("x", 0, 10).any()


def test_what_does_not_belong_into_a_shard(tmp_path: Path) -> None:
    (shard,) = ShardLayout.plan([info("x", 10)], 10**9).shards
    with ShardWriter(tmp_path / "m", shard) as writer:
        with pytest.raises(TypeError, match="x is written as float32, not float64"):
            writer.write("x", 0, np.ones(10))
        for start in (-1, 6):
            with pytest.raises(IndexError, match="x has 10 elements"):
                writer.write("x", start, np.ones(5, np.float32))


def test_values_that_are_not_contiguous(tmp_path: Path) -> None:
    (shard,) = ShardLayout.plan([info("x", 2, 3), info("zero_dim")], 10**9).shards
    values = np.arange(6, dtype=np.float32).reshape(3, 2).T
    with ShardWriter(tmp_path / "m", shard) as writer:
        writer.write("x", 0, values)
        writer.write("zero_dim", 0, np.array(7, np.float32))
    file = SafetensorsFile(tmp_path / "m")
    np.testing.assert_array_equal(file.read_stored("x", 0, 6).reshape(2, 3), values)
    assert file.read_stored("zero_dim", 0, 1) == 7


def fail_with(code: int):
    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, "the disk is full; this file takes .* bytes"),
        (errno.EFBIG, "cannot hold a file of"),
        (errno.EIO, "cannot be written: Input/output error"),
    ],
)
def test_a_disk_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, message: str
) -> None:
    (shard,) = ShardLayout.plan([info("x", 10)], 10**9).shards
    path = tmp_path / "m.partial"
    writer = ShardWriter(path, shard)
    for call in ("pwrite", "fsync", "posix_fallocate"):
        monkeypatch.setattr(os, call, fail_with(code))
    with pytest.raises(OutputError, match=message):
        writer.write("x", 0, np.ones(10, np.float32))
    with pytest.raises(OutputError, match=message):
        writer.sync()
    with pytest.raises(OutputError, match=message):
        ShardWriter(path, shard)
    assert not path.exists()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_file_systems_that_cannot_reserve_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", fail_with(code))
    layout = ShardLayout.plan([info("x", 10)], 10**9)
    write(layout, tmp_path)
    assert list(open_checkpoint(str(tmp_path)).tensors) == ["x"]


def test_a_path_that_cannot_be_opened_is_left_alone(tmp_path: Path) -> None:
    (shard,) = ShardLayout.plan([info("x", 10)], 10**9).shards
    with pytest.raises(OutputError, match="Is a directory"):
        ShardWriter(tmp_path, shard)
    with pytest.raises(OutputError, match="No such file"):
        ShardWriter(tmp_path / "missing" / "m", shard)
    assert tmp_path.is_dir()


def test_too_many_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", fail)
    (shard,) = ShardLayout.plan([info("x", 10)], 10**9).shards
    with pytest.raises(OutputError, match=r"Too many open files\n  Raise the limit with `ulimit"):
        ShardWriter(tmp_path / "m", shard)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, data[:7], at))
    layout = ShardLayout.plan([info("x", 100)], 10**9)
    write(layout, tmp_path)
    stored = open_checkpoint(str(tmp_path)).read_stored("x", 0, 100)
    assert stored.tobytes() == b"\1" * 400


def test_read_back_through_a_checkpoint(tmp_path: Path) -> None:
    layout = ShardLayout.plan([info("x", 3, dtype=Dtype.BF16)], 10**9)
    (shard,) = layout.shards
    with ShardWriter(tmp_path / shard.file, shard) as writer:
        writer.write("x", 0, np.array([1, 2, 3], Dtype.BF16.storage))
    assert numbers(open_checkpoint(str(tmp_path)), "x").tolist() == [1, 2, 3]
