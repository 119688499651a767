"""Images from folders and idx files, against the bytes that were written."""

from __future__ import annotations

import gzip
import sys

import numpy as np
import pytest

from isthmus.errors import CalibrationError
from isthmus.models.images import read_images, sample_images


def idx(array, kind=8):
    shape = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, kind, array.ndim]) + shape + array.tobytes()


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (3, 4, 5), np.uint8)


def refused(path):
    with pytest.raises(CalibrationError) as caught:
        list(read_images(path))
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_idx_files_plain_and_compressed(tmp_path, pixels):
    (tmp_path / "a-idx3-ubyte").write_bytes(idx(pixels))
    (tmp_path / "a-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels)))
    for name in ("a-idx3-ubyte", "a-idx3-ubyte.gz"):
        images = np.stack(list(read_images(tmp_path / name)))
        assert images.dtype == np.float32
        np.testing.assert_allclose(images, pixels[..., None] / 255.0, rtol=1e-6)


def test_a_folder_of_images(tmp_path, pixels):
    image = pytest.importorskip("PIL.Image")
    colours = np.stack([pixels[0]] * 3, axis=-1)
    (tmp_path / "cats").mkdir()
    image.fromarray(pixels[0]).save(tmp_path / "cats" / "b.png")
    image.fromarray(colours).save(tmp_path / "a.PNG")
    colour, grey = read_images(tmp_path)
    np.testing.assert_allclose(colour, colours / 255.0, rtol=1e-6)
    np.testing.assert_allclose(grey, pixels[0, ..., None] / 255.0, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "header says"),
        (lambda data: data[:3], "no idx file"),
        (lambda data: b"\x1f" + data[1:], "no idx file"),
        (lambda data: data[:2] + b"\x0d" + data[3:], "no idx file"),
        (lambda data: data[:3] + b"\x01" + data[4:], "Labels are not needed"),
        (lambda data: data[:4] + bytes(4) + data[8:16], "holds no images"),
    ],
)
def test_damaged_idx_files(tmp_path, pixels, change, message):
    path = tmp_path / "a.idx"
    path.write_bytes(change(idx(pixels)))
    assert message in refused(path)


def test_a_broken_archive(tmp_path, pixels):
    path = tmp_path / "a.idx.gz"
    path.write_bytes(gzip.compress(idx(pixels))[:-9])
    assert "Download it again" in refused(path)


def test_what_is_missing_or_of_another_kind(tmp_path):
    refused(tmp_path / "none")
    assert "holds no images" in refused(tmp_path)
    path = tmp_path / "a.npy"
    path.touch()
    assert "idx" in refused(path)


def test_a_damaged_image(tmp_path):
    pytest.importorskip("PIL")
    (tmp_path / "a.png").write_bytes(b"no image")
    assert "a.png is no readable image" in refused(tmp_path)


def test_image_files_without_pillow_name_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    (tmp_path / "a.png").touch()
    assert "isthmus[calibration]" in refused(tmp_path)


def test_the_sample_depends_on_contents_and_seed_alone():
    images = list(np.random.default_rng(0).random((20, 2, 2, 1), np.float32))
    chosen = sample_images(images, 5, seed=1)
    np.testing.assert_array_equal(sample_images(images[::-1], 5, seed=1), chosen)
    assert not np.array_equal(sample_images(images, 5, seed=2), chosen)
