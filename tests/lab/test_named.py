"""Data by name. Where `datasets` is not installed, a stand-in with its columns answers."""

from __future__ import annotations

import gzip
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from isthmus.errors import IsthmusError
from isthmus.lab.data.named import training_data


def idx(array):
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def test_digits_are_those_of_scikit_learn_each_in_one_part(tmp_path):
    data = training_data("digits", tmp_path)
    assert data.inputs.shape[1:] == (1, 8, 8)
    assert data.inputs.dtype == torch.float32
    assert data.targets.dtype == torch.int64
    found = load_digits()
    rows = torch.cat([data.inputs, data.test_inputs]).reshape(-1, 64) * 16
    labelled = np.column_stack([rows.numpy(), torch.cat([data.targets, data.test_targets]).numpy()])
    expected = np.column_stack([found.data, found.target])
    assert sorted(map(tuple, labelled)) == sorted(map(tuple, expected))
    again = training_data("digits", tmp_path)
    assert torch.equal(data.inputs, again.inputs)


@pytest.mark.parametrize(
    ("name", "folder", "pack", "ending"),
    [("mnist", "mnist", bytes, ""), ("fashion-mnist", "fashion-mnist", gzip.compress, ".gz")],
)
def test_pictures_of_files(tmp_path, name, folder, pack, ending):
    chance = np.random.default_rng(0)
    place = tmp_path / "data" / folder
    place.mkdir(parents=True)
    written = {}
    for part, count in (("train", 12), ("t10k", 5)):
        written[part] = chance.integers(0, 256, (count, 28, 28)), np.arange(count) % 10
        for kind, array in zip(("images-idx3", "labels-idx1"), written[part], strict=True):
            (place / f"{part}-{kind}-ubyte{ending}").write_bytes(pack(idx(array)))
    data = training_data(name, tmp_path)
    for images, classes, (pixels, labels) in (
        (data.inputs, data.targets, written["train"]),
        (data.test_inputs, data.test_targets, written["t10k"]),
    ):
        assert np.array_equal((images[:, 0] * 255).round().numpy(), pixels)
        assert np.array_equal(classes.numpy(), labels)
    assert data.classes == 10


def test_what_make_data_did_not_fetch(tmp_path):
    for name in ("mnist", "kernel"):
        with pytest.raises(IsthmusError, match="make data"):
            training_data(name, tmp_path)


def test_an_unknown_name_with_the_nearest_known(tmp_path):
    with pytest.raises(IsthmusError, match=r"no data set 'mnits'(.|\n)*'mnist'"):
        training_data("mnits", tmp_path)


class Part:
    """Rows with features, as `datasets.Dataset` shows them."""

    def __init__(self, features, **columns):
        self.features, self.columns = features, columns

    def __getitem__(self, name):
        return self.columns[name]

    def train_test_split(self, *, test_size, seed):
        assert test_size == 0.1
        assert seed == 0
        return {"train": self._some(slice(1, None)), "test": self._some(slice(1))}

    def _some(self, rows):
        return Part(self.features, **{name: column[rows] for name, column in self.columns.items()})


@pytest.fixture
def library(monkeypatch):
    """`datasets` with the three kinds of columns; `answers` is what it loads."""
    module = ModuleType("datasets")
    for name in ("Image", "ClassLabel", "Value"):
        setattr(module, name, type(name, (SimpleNamespace,), {}))
    module.answers = {}

    def load_dataset(name):
        if name not in module.answers:
            raise FileNotFoundError(f"Couldn't reach {name!r} on the Hub")
        return module.answers[name]

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


def pictures(library, arrays, labels):
    features = {"image": library.Image(), "label": library.ClassLabel(num_classes=3)}
    return Part(features, image=[Image.fromarray(array) for array in arrays], label=labels)


def drawn(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def test_pictures_of_datasets_keep_their_channels(library, tmp_path):
    colours, greys = drawn(4, 6, 5, 3), drawn(4, 6, 5)
    library.answers = {
        "org/colours": {
            "train": pictures(library, colours, [0, 2, 1, 2]),
            "test": pictures(library, colours[:2], [0, 2]),
        },
        "org/greys": {
            "train": pictures(library, greys, [0, 2, 1, 2]),
            "validation": pictures(library, greys[:2], [0, 2]),
        },
    }
    data = training_data("org/colours", tmp_path)
    assert data.inputs.dtype == torch.float32
    assert np.array_equal((data.inputs * 255).round().numpy(), colours.transpose(0, 3, 1, 2))
    assert data.targets.tolist() == [0, 2, 1, 2]
    assert data.classes == 3
    assert data.test_targets.tolist() == [0, 2]
    data = training_data("org/greys", tmp_path)
    assert np.array_equal((data.inputs * 255).round().numpy(), greys[:, None])


def test_without_a_test_part_a_tenth_is_held_out(library, tmp_path):
    greys = drawn(4, 6, 5)
    library.answers = {"org/one": {"train": pictures(library, greys, [0, 2, 1, 2])}}
    data = training_data("org/one", tmp_path)
    assert data.test_targets.tolist() == [0]
    assert data.targets.tolist() == [2, 1, 2]


def texts(library, *rows):
    return Part({"text": library.Value(dtype="string")}, text=list(rows))


def test_texts_are_bytes_and_the_bytes_that_follow(library, tmp_path):
    (tmp_path / "folder").mkdir()
    name = str(tmp_path / "folder")
    written = ("The gulls of Ærø.", None, "And more of them.")
    library.answers = {
        name: {"train": texts(library, *written), "test": texts(library, "gulls " * 3)}
    }
    data = training_data(name, tmp_path, context=5)
    content = "The gulls of Ærø.\n\nAnd more of them.".encode()
    count = (len(content) - 1) // 5
    assert data.inputs.shape == data.targets.shape == (count, 5)
    assert data.inputs.dtype == torch.int64
    assert bytes(data.inputs.flatten().tolist()) == content[: count * 5]
    assert bytes(data.targets.flatten().tolist()) == content[1 : count * 5 + 1]
    assert data.classes == 256
    with pytest.raises(IsthmusError, match="18 bytes, too few for one example of 20"):
        training_data(name, tmp_path, context=20)


def test_bad_data_of_datasets(library, tmp_path):
    greys = drawn(2, 6, 5)
    whole = pictures(library, greys, [0, 1])
    numbers = Part({"n": library.Value(dtype="int64")}, n=[1])
    library.answers = {
        "a/untrained": {"test": whole},
        "a/numbers": {"train": numbers, "test": numbers},
        "a/secret": {"train": whole, "test": pictures(library, greys, [-1, -1])},
        "a/empty": {"train": whole, "test": pictures(library, [], [])},
        "a/uneven": {"train": pictures(library, [greys[0], greys[0, :3]], [0, 1]), "test": whole},
        "a/larger": {"train": whole, "test": pictures(library, drawn(2, 7, 5), [0, 1])},
    }
    for name, problem in (
        ("a/missing", r"cannot load 'a/missing': Couldn't reach(.|\n)*can reach"),
        ("a/untrained", "has the parts test, and no train"),
        ("a/numbers", "has the columns n: no pictures with classes, and no text"),
        ("a/secret", "pictures without a class"),
        ("a/empty", "a part without pictures"),
        ("a/uneven", "pictures of 2 sizes"),
        ("a/larger", r"pictures of \[6, 5\] to train on and of \[7, 5\] to test"),
    ):
        with pytest.raises(IsthmusError, match=problem):
            training_data(name, tmp_path)


def test_without_the_library(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(IsthmusError, match="pip install datasets"):
        training_data("org/name", tmp_path)


def test_folders_through_the_library_itself(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    folder = tmp_path / "pictures"
    array = drawn(6, 5)
    for part in ("train", "test"):
        for name in ("cat", "dog"):
            (folder / part / name).mkdir(parents=True)
            Image.fromarray(array).save(folder / part / name / "one.png")
    data = training_data(str(folder), tmp_path)
    assert data.targets.tolist() == [0, 1]
    assert np.array_equal((data.inputs[0, 0] * 255).round().numpy(), array)
