from __future__ import annotations

import gzip
import io

import numpy as np
import pytest
import torch
from rich.console import Console

from isthmus.errors import IsthmusError
from isthmus.lab.adapters_families import VisionFamily
from isthmus.lab.data.pictures import Pictures, load_half
from isthmus.lab.images import load_image_encoder
from isthmus.lab.progress import Narrator
from isthmus.lab.settings import FineTuning


def idx(array):
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


@pytest.fixture
def data(tmp_path):
    """Forty pictures of random pixels for every file."""
    chance = np.random.default_rng(0)
    for folder, pack, suffix in (("mnist", bytes, ""), ("fashion-mnist", gzip.compress, ".gz")):
        (tmp_path / folder).mkdir()
        for part in ("train", "t10k"):
            images = chance.integers(0, 256, (40, 28, 28))
            labels = np.arange(40) % 10
            for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
                path = tmp_path / folder / f"{part}-{kind}-ubyte{suffix}"
                path.write_bytes(pack(idx(array)))
    return tmp_path


def test_a_half_is_five_classes_counted_from_zero(data):
    corpus = load_half(Pictures(data), "fashion", "high")
    assert corpus.classes == ("sandal", "shirt", "sneaker", "bag", "ankle boot")
    assert corpus.texts[:2] == ("fashion test 5", "fashion test 6")
    assert corpus.labels == (0, 1, 2, 3, 4) * 4


def test_a_turn_is_a_quarter_and_four_are_none(data):
    pictures = Pictures(data)
    upright = np.array(pictures.pixels("mnist train 3")).reshape(28, 28)
    assert np.array_equal(upright, pictures.array("mnist", "train", "images")[3])
    turned = np.array(pictures.pixels("mnist train 3 turned 1")).reshape(28, 28)
    assert np.array_equal(turned, np.rot90(upright))
    assert pictures.pixels("mnist train 3 turned 4") == upright.reshape(-1).tolist()


def test_absent_pictures_name_the_target_that_fetches_them(tmp_path):
    with pytest.raises(IsthmusError, match="make data"):
        load_half(Pictures(tmp_path), "mnist", "low")


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda _: b"", lambda _: b"<html>"])
def test_damaged_pictures_are_refused(data, damage):
    path = data / "mnist" / "t10k-labels-idx1-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(IsthmusError, match="IDX"):
        load_half(Pictures(data), "mnist", "low")


def test_the_base_is_trained_once_and_has_unit_features(data, tmp_path, monkeypatch):
    monkeypatch.setattr("isthmus.lab.images.PICTURES", 8)
    monkeypatch.setattr("isthmus.lab.images.PRETRAINING", FineTuning(batch_size=8))
    family = VisionFamily(data)
    narrator = Narrator(Console(file=io.StringIO()))
    folder, encoder = family.base(tmp_path / "cache", narrator)
    names = ["mnist test 1", "fashion test 2", "mnist test 3"]
    features = encoder.features(names, 784)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(3))
    again, other = family.base(tmp_path / "cache", narrator)
    assert again == folder
    assert torch.equal(other.features(names, 784), features)
    assert len(narrator.stages) == 1
    assert torch.equal(
        load_image_encoder(folder, Pictures(data)).features(names[:1], 784), features[:1]
    )
