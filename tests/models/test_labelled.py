"""Examples with their classes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from isthmus.errors import CalibrationError
from isthmus.models.examples import read_rows
from isthmus.models.labelled import Classes, labelled_images, labelled_texts

UNNAMED = Classes({"LABEL_0": 0, "LABEL_1": 1})
ANIMALS = Classes({"dog": 0, "cat": 1, "2": 2})


def texts(path, classes, column=None, label=None):
    return list(labelled_texts(read_rows(path), column, label, classes))


def written(folder, name, *rows):
    path = folder / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_rows_with_numbers_and_names(tmp_path):
    rows = [
        {"text": "a", "label": 1},
        {"text": "", "label": 0},
        {"text": "b", "label": "dog"},
        {"text": "c", "label": "1"},
        {"text": "d", "label": "2"},
    ]
    path = written(tmp_path, "a.jsonl", *rows)
    assert texts(path, ANIMALS) == [("a", 1), ("b", 0), ("c", 1), ("d", 2)]


def test_columns_may_be_named(tmp_path):
    path = written(tmp_path, "a.csv", "text,body,labels,kind", "x,a,0,1", "y,b,0,0")
    assert texts(path, UNNAMED) == [("x", 0), ("y", 0)]
    assert texts(path, UNNAMED, "body", "kind") == [("a", 1), ("b", 0)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "line 1 has no label in the column 'label'; it has 'text'"),
        ({"text": "a", "label": None}, "has no label in the column 'label'"),
        ("plain", "has no label in the column 'label'; it has none"),
        ({"text": "a", "label": 2}, "has the label 2; the model has 2 classes: LABEL_0, LABEL_1"),
        ({"text": "a", "label": -1}, "has the label -1"),
        ({"text": "a", "label": "cat"}, "has the label 'cat'"),
        ({"text": "a", "label": 1.5}, "has the label 1.5"),
        ({"text": "a", "label": [0, 1]}, r"has the label \[0, 1\]"),
    ],
)
def test_labels_that_do_not_fit(tmp_path, row, message):
    with pytest.raises(CalibrationError, match=message):
        texts(written(tmp_path, "a.jsonl", json.dumps(row)), UNNAMED)


def drawn(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def idx(array):
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


def folders(folder, *names):
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(names):
        (folder / name).mkdir()
        image.fromarray(np.full((4, 4), 10 * number, np.uint8)).save(folder / name / "a.png")
    return folder


def classes_of(folder, classes):
    """By what is drawn in the folders: tens of the place of their names in the call."""
    return {
        round(255 * float(image[0, 0, 0])) // 10: label
        for image, label in labelled_images(folder, classes)
    }


def test_folders_by_the_names_that_the_model_has(tmp_path):
    assert classes_of(folders(tmp_path, "cat", "dog"), ANIMALS) == {0: 1, 1: 0}


def test_folders_by_numbers_and_not_by_the_order_of_their_digits(tmp_path):
    many = Classes({f"LABEL_{number}": number for number in range(11)})
    found = classes_of(folders(tmp_path, *map(str, range(11))), many)
    assert found == {number: number for number in range(11)}


def test_folders_by_their_order_where_nobody_names_classes(tmp_path):
    assert classes_of(folders(tmp_path, "zebra", "ape"), UNNAMED) == {0: 1, 1: 0}


def test_folders_that_the_model_does_not_know(tmp_path):
    with pytest.raises(CalibrationError, match="folder ape has the label 'ape'"):
        classes_of(folders(tmp_path, "dog", "ape"), ANIMALS)


def test_a_folder_without_classes(tmp_path):
    (tmp_path / "a.png").touch()
    with pytest.raises(CalibrationError, match="no folders"):
        list(labelled_images(tmp_path, UNNAMED))


def test_idx_files_in_pairs(tmp_path):
    images, labels = drawn(5, 4, 4), np.array([0, 1, 1, 0, 1])
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(idx(images))
    with pytest.raises(CalibrationError, match="no labels beside it"):
        list(labelled_images(path, UNNAMED))
    beside = tmp_path / "train-labels-idx1-ubyte"
    beside.write_bytes(idx(labels))
    found = list(labelled_images(path, UNNAMED))
    assert [label for _, label in found] == labels.tolist()
    assert np.array_equal(np.stack([image for image, _ in found])[..., 0] * 255, images)
    beside.write_bytes(idx(labels[:4]))
    with pytest.raises(CalibrationError, match="5 images and train-labels-idx1-ubyte 4 labels"):
        list(labelled_images(path, UNNAMED))
    beside.write_bytes(idx(labels + 1))
    with pytest.raises(CalibrationError, match=r"item 1 has the label 2"):
        list(labelled_images(path, UNNAMED))
    beside.write_bytes(idx(images))
    with pytest.raises(CalibrationError, match="3 dimensions, not those of labels"):
        list(labelled_images(path, UNNAMED))
