"""Datasets of the Hub by name. No hub is reached here: the library's door is replaced."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from isthmus.errors import CalibrationError
from isthmus.models import hub_examples
from isthmus.models.hub_examples import is_dataset_name, read_hub_examples


@pytest.fixture
def hub(monkeypatch):
    """What `datasets.load_dataset` is asked, and what it answers."""
    asked: list[tuple] = []
    answers = {"rows": [{"text": "a"}, {"text": ""}, {"text": "b"}]}

    def load_dataset(name, config, *, split, streaming):
        assert streaming
        asked.append((name, config, split))
        if isinstance(answers["rows"], Exception):
            raise answers["rows"]
        return iter(answers["rows"])

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked, answers


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("org/name", ("org/name", None, "train")),
        ("org/name:main", ("org/name", "main", "train")),
        ("org/name:main:train+test", ("org/name", "main", "train+test")),
        ("org/name:main:validation", ("org/name", "main", "validation")),
    ],
)
def test_names(text, asked, hub):
    assert is_dataset_name(text)
    assert list(read_hub_examples(text)) == ["a", "b"]
    assert hub[0] == [asked]


@pytest.mark.parametrize("text", ["./org/name", "name", "a/b/c", "../x/y", "/a/b"])
def test_paths_are_no_names(text):
    assert not is_dataset_name(text)


def test_no_more_rows_are_fetched_than_are_looked_at(hub, monkeypatch):
    monkeypatch.setattr(hub_examples, "MOST", 3)
    fetched = []
    hub[1]["rows"] = ({"text": str(fetched.append(n) or n)} for n in range(100))
    assert list(read_hub_examples("org/name")) == ["0", "1", "2"]
    assert len(fetched) == 3


@pytest.mark.usefixtures("hub")
def test_a_wrong_column():
    with pytest.raises(CalibrationError, match=r"org/name, row 0 has no column 'question'"):
        list(read_hub_examples("org/name", "question"))


def test_what_the_hub_does_not_have(hub):
    hub[1]["rows"] = FileNotFoundError("Dataset 'org/name' doesn't exist on the Hub")
    with pytest.raises(
        CalibrationError, match=r"no file here(.|\n)*doesn't exist(.|\n)*Name a file"
    ):
        list(read_hub_examples("org/name"))


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CalibrationError, match="pip install datasets"):
        list(read_hub_examples("org/name"))
