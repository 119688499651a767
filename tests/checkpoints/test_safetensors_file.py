"""The safetensors library is the oracle; the attacks are our own."""

import contextlib
import json
import os
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from isthmus.checkpoints.dtypes import Dtype, decode
from isthmus.checkpoints.safetensors_file import SafetensorsFile
from isthmus.errors import CheckpointError

from .files import raw_safetensors, save

TORCH_TYPES = [getattr(torch, dtype.torch_name) for dtype in Dtype]


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def every_bit_pattern(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.tensor([True, False, True])
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", TORCH_TYPES, ids=str)
def test_every_format_reads_as_the_library_reads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"x": every_bit_pattern(dtype), "zero_dim": torch.ones((), dtype=dtype)}
    tensors["empty"] = torch.empty((3, 0), dtype=dtype)
    save_file(tensors, tmp_path / "m.safetensors")
    file = SafetensorsFile(tmp_path / "m.safetensors")
    assert {name: info.shape for name, info in file.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    for name, tensor in load_file(tmp_path / "m.safetensors").items():
        size = tensor.numel()
        stored = file.read_stored(name, 0, size)
        assert stored.dtype == file.tensors[name].dtype.storage
        assert stored.tobytes() == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for ours in (np.full(size, 7, np.float32), np.full(size, 7, np.float64)):
            file.read(name, 0, ours)
            theirs = tensor.reshape(-1).to(getattr(torch, ours.dtype.name)).numpy()
            np.testing.assert_array_equal(ours, theirs)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "int32", "float8_e4m3fn"]
)
def test_any_range_is_the_slice(tmp_path_factory, dtype: str, data: st.DataObject) -> None:
    storage = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = np.arange(300).astype(np.float32).astype(storage)
    path = tmp_path_factory.getbasetemp() / f"range-{dtype}.safetensors"
    if not path.exists():
        # The library's numpy writer lacks float8, its torch writer does not.
        save_file({"a": torch.zeros(3), "x": torch.arange(300.0).to(getattr(torch, dtype))}, path)
    start = data.draw(st.integers(0, 300))
    stop = data.draw(st.integers(start, 300))
    file = SafetensorsFile(path)
    out = np.full(stop - start + 2, -1, np.float32)
    file.read("x", start, out[1:-1])
    np.testing.assert_array_equal(out[1:-1], values[start:stop].astype(np.float32))
    assert out[0] == out[-1] == -1
    assert file.read_stored("x", start, stop).tobytes() == values[start:stop].tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_ranges_larger_than_the_scratch_buffer(tmp_path: Path, dtype) -> None:
    values = np.random.default_rng(0).normal(size=300_001).astype(np.float32)
    save_file(
        {"x": torch.from_numpy(values).to(getattr(torch, np.dtype(dtype).name))},
        tmp_path / "m.safetensors",
    )
    out = np.empty(299_999, np.float32)
    SafetensorsFile(tmp_path / "m.safetensors").read("x", 1, out)
    np.testing.assert_array_equal(out, values.astype(dtype).astype(np.float32)[1:-1])


def test_threads_read_at_once(tmp_path: Path) -> None:
    values = np.tile(np.arange(20_000, dtype=np.float32) / 7, 10).astype(np.float16)
    file = SafetensorsFile(save(tmp_path / "m.safetensors", {"x": values}))
    wrong = []

    def work(offset: int) -> None:
        out = np.empty(50_000, np.float32)
        for _ in range(20):
            file.read("x", offset, out)
            if not np.array_equal(out, values[offset : offset + out.size], equal_nan=True):
                wrong.append(offset)

    threads = [threading.Thread(target=work, args=(i * 30_000,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_short_reads_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.arange(1000, dtype=np.float32)
    file = SafetensorsFile(save(tmp_path / "m.safetensors", {"x": values}))
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: whole(fd, [parts[0][:7]], at))
    out = np.empty(1000, np.float32)
    file.read("x", 0, out)
    np.testing.assert_array_equal(out, values)


def test_a_bool_byte_other_than_0_and_1_is_true(tmp_path: Path) -> None:
    path = raw_safetensors(
        tmp_path / "m.safetensors", {"x": entry("BOOL", (3,), (0, 3))}, b"\0\1\xff"
    )
    assert SafetensorsFile(path).read_stored("x", 0, 3).tobytes() == b"\0\1\1"


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (0, 3), (2, 1)])
def test_elements_out_of_range(tmp_path: Path, start: int, stop: int) -> None:
    file = SafetensorsFile(save(tmp_path / "m.safetensors", {"x": np.zeros(2, np.float32)}))
    with pytest.raises(IndexError, match="x has 2 elements"):
        file.read_stored("x", start, stop)


def test_a_file_cut_after_opening(tmp_path: Path) -> None:
    path = save(tmp_path / "m.safetensors", {"x": np.zeros(1000, np.float32)})
    file = SafetensorsFile(path)
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(CheckpointError, match="inside 'x': it was changed or cut"):
        file.read("x", 0, np.empty(1000, np.float32))
    file.read("x", 0, np.empty(975, np.float32))


def test_closing_twice_and_reading_after(tmp_path: Path) -> None:
    file = SafetensorsFile(save(tmp_path / "m.safetensors", {"x": np.zeros(2, np.float32)}))
    file.close()
    file.close()
    with pytest.raises(CheckpointError, match="cannot read 'x'"):
        file.read("x", 0, np.empty(2, np.float32))


def test_descriptors_are_released(tmp_path: Path) -> None:
    good = save(tmp_path / "m.safetensors", {"x": np.zeros(2, np.float32)})
    bad = raw_safetensors(tmp_path / "bad.safetensors", "{")
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        SafetensorsFile(good).close()
        with pytest.raises(CheckpointError):
            SafetensorsFile(bad)
        SafetensorsFile(good)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_metadata_of_save_model_becomes_ties(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.safetensors",
        {"a": np.zeros(2, np.float32)},
        metadata={"format": "pt", "b": "a", "a": "a", "c": "gone"},
    )
    assert SafetensorsFile(path).tied == {"b": "a"}


BAD_HEADERS = {
    "not json": ("{", "not valid JSON"),
    "not utf-8": (b'{"\xff": 1}', "not valid JSON"),
    "not an object": ("[]", "does not begin with"),
    "leading space": (" {}", "does not begin with"),
    "trailing text": ("{} x", "not valid JSON"),
    "NaN": ('{"x": NaN}', "NaN is not JSON"),
    "deep": ('{"x":' + "[" * 200_000 + "]" * 200_000 + "}", "not valid JSON"),
    "huge number": ('{"x":' + "9" * 5000 + "}", "not valid JSON"),
    "duplicate tensor": (
        '{"x":' + json.dumps(entry()) + ',"x":' + json.dumps(entry()) + "}",
        "the key 'x' occurs twice",
    ),
    "duplicate field": (
        '{"x":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        "the key 'dtype' occurs twice",
    ),
    "surrogate name": ('{"\\ud800":' + json.dumps(entry()) + "}", "not valid Unicode"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, "__metadata__ must map text to text"),
    "metadata is a list": ({"__metadata__": []}, "__metadata__ must map text to text"),
    "metadata with half a character": ('{"__metadata__": {"a": "\\ud800"}}', "__metadata__ is not valid Unicode"),
    "entry is a list": ({"x": []}, "'x' needs dtype, shape and data_offsets"),
    "missing field": ({"x": {"dtype": "F32", "shape": [2]}}, "'x' needs dtype"),
    "extra field": ({"x": entry() | {"more": 1}}, "'x' needs dtype"),
    "unknown dtype": ({"x": entry("F4")}, "'x' has the number format 'F4'"),
    "dtype is a list": ({"x": entry(["F32"])}, "has the number format"),
    "negative axis": ({"x": entry(shape=(-2,))}, r"has the shape \[-2\]"),
    "float axis": ({"x": entry(shape=(2.0,))}, r"has the shape \[2.0\]"),
    "bool axis": ({"x": entry(shape=(True, 2))}, "has the shape"),
    "shape is text": ({"x": {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]}}, "has the shape"),
    "overflow": ({"x": entry(shape=(2**32, 2**32))}, "impossible shape"),
    "hidden overflow": ({"x": entry(shape=(0, 2**40, 2**40), offsets=(0, 0))}, "impossible shape"),
    "too many axes": ({"x": entry(shape=(1,) * 65)}, "impossible shape"),
    "one offset": ({"x": entry(offsets=(0,))}, r"has offsets \[0\]"),
    "reversed offsets": ({"x": entry(offsets=(8, 0))}, "has offsets"),
    "negative offset": ({"x": entry(offsets=(-8, 0))}, "has offsets"),
    "size and shape differ": ({"x": entry(shape=(3,))}, "takes 12 bytes, but its offsets 0 to 8 span 8"),
    "begins late": ({"x": entry(offsets=(4, 12))}, "begins at byte 4"),
    "overlap": ({"x": entry(), "y": entry(offsets=(4, 12))}, "'x' and 'y' overlap"),
    "same place": ({"x": entry(), "y": entry()}, "'x' and 'y' overlap"),
    "hole": ({"x": entry(), "y": entry(offsets=(12, 20))}, "'x' and 'y' have a hole"),
    "truncated": (
        {"x": entry(shape=(8,), offsets=(0, 32))},
        "is truncated: 32 bytes of data expected, 24 found",
    ),
    "rest": ({"x": entry()}, "16 bytes at the end belong to no tensor"),
}  # fmt: skip


@pytest.mark.parametrize(("header", "message"), BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_headers_that_lie(tmp_path: Path, header, message: str) -> None:
    path = raw_safetensors(tmp_path / "bad.safetensors", header, bytes(24))
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert "bad.safetensors" in caught.value.problem
    assert caught.value.cure


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"1234567", "only 7 bytes long"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is not a safetensors file"),
        ((2**63).to_bytes(8, "little") + b"{}", "is not a safetensors file"),
        ((1000).to_bytes(8, "little") + b"{}", "truncated: 1008 bytes expected for the header"),
        ((0).to_bytes(8, "little"), "does not begin with"),
    ],
)
def test_files_without_a_header(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    for name in ("folder", "pipe"):
        with pytest.raises(CheckpointError, match="not a file"):
            SafetensorsFile(tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="No such file"):
        SafetensorsFile(tmp_path / "missing.safetensors")


def test_an_empty_header_and_spaces_after_it_are_fine(tmp_path: Path) -> None:
    assert not SafetensorsFile(raw_safetensors(tmp_path / "a.safetensors", "{}   ")).tensors
    path = raw_safetensors(tmp_path / "b.safetensors", {"__metadata__": {}, "x": entry()}, bytes(8))
    assert list(SafetensorsFile(path).tensors) == ["x"]


GOOD = json.dumps(
    {"__metadata__": {"format": "pt"}, "a": entry(), "b": entry("BF16", (2, 2), (8, 16))}
).encode()


@given(
    edits=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.binary(max_size=3)), max_size=4),
    data=st.integers(0, 24),
    length=st.none() | st.integers(0, 2**64 - 1),
)
@settings(max_examples=500, deadline=None)
def test_corrupted_headers_open_or_are_refused(tmp_path_factory, edits, data, length) -> None:
    header = bytearray(GOOD)
    for position, new in edits:
        header[position : position + len(new)] = new
    path = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    raw_safetensors(path, bytes(header), bytes(data), length=length)
    try:
        file = SafetensorsFile(path)
    except CheckpointError:
        return
    for name, info in file.tensors.items():
        assert file.read_stored(name, 0, info.numel).size == info.numel


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["F32", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(header=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), JSON, max_size=3))
@settings(max_examples=200, deadline=None)
def test_any_json_opens_or_is_refused(tmp_path_factory, header) -> None:
    path = raw_safetensors(tmp_path_factory.getbasetemp() / "any.safetensors", header, bytes(8))
    with contextlib.suppress(CheckpointError):
        SafetensorsFile(path)


def test_metadata_that_happens_to_name_a_tensor(tmp_path: Path) -> None:
    path = save(
        tmp_path / "m.safetensors", {"pt": np.zeros(2, np.float32)}, metadata={"format": "pt"}
    )
    assert SafetensorsFile(path).tied == {}


@pytest.mark.parametrize("dtype", [Dtype.F16, Dtype.F8_E4M3, Dtype.F8_E5M2])
def test_tables_decode_every_code_as_numpy_does(dtype: Dtype) -> None:
    bits = 8 * dtype.itemsize
    codes = np.tile(np.arange(1 << bits, dtype=f"u{dtype.itemsize}"), 3)
    out = np.empty(codes.size, np.float32)
    decode(codes.view(dtype.storage), out)
    expected = codes.view(dtype.storage).astype(np.float32)
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))
