"""Whether two models read text the same way, told from files that may hold anything."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.checkpoints import Checkpoint, open_checkpoint
from isthmus.checkpoints.vocabulary import differing_tokens

from .files import save


def model(folder: Path, **files: Any) -> Checkpoint:
    """A model with vocabularies: text as it is, other things as JSON; `_` stands for a dot."""
    save(folder / "model.safetensors", {"a": np.ones(2, np.float32)})
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("_", ".")).write_text(text)
    return open_checkpoint(str(folder))


GOOD = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"content": "c", "id": 2}]}


@pytest.mark.parametrize(
    "bad",
    [
        {"model": {"vocab": [1, 2]}},
        {"model": {"vocab": [[]]}},
        {"model": {"vocab": [[{}]]}},
        {"model": {"vocab": [["a", 0], [[], 1]]}},
        {"model": {"vocab": {"a": []}}},
        {"model": {"vocab": 7}},
        {"model": {}},
        GOOD | {"added_tokens": None},
        GOOD | {"added_tokens": {"a": 1}},
        GOOD | {"added_tokens": [{}]},
        GOOD | {"added_tokens": ["c"]},
        GOOD | {"added_tokens": [{"content": "c"}]},
        GOOD | {"added_tokens": [{"content": [], "id": 1}]},
        [],
        "[" * 100_000,
        '{"model": ' * 100_000,
        "",
    ],
    ids=lambda bad: str(bad)[:40],
)
def test_what_cannot_be_told(tmp_path: Path, bad: Any) -> None:
    good = model(tmp_path / "good", tokenizer_json=GOOD)
    other = model(tmp_path / "bad", tokenizer_json=bad)
    assert differing_tokens(good, other) is None
    assert differing_tokens(other, good) is None


def test_what_can_be_told(tmp_path: Path) -> None:
    good = model(tmp_path / "good", tokenizer_json=GOOD)
    same = model(tmp_path / "same", tokenizer_json=json.dumps(GOOD, indent=1))
    unigram = [["a", -1.5], ["b", -2], ["d", -3]]
    other = model(tmp_path / "other", tokenizer_json={"model": {"vocab": unigram}})
    assert differing_tokens(good, same) == 0
    assert differing_tokens(good, other) == 2


def test_model_is_a_word_too(tmp_path: Path) -> None:
    one = model(tmp_path / "one", vocab_json={"model": 0, "a": 1})
    other = model(tmp_path / "other", vocab_json={"model": 1, "a": 1})
    assert differing_tokens(one, other) == 1


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    good = model(tmp_path / "good", tokenizer_json=GOOD)
    other = model(tmp_path / "other")
    os.mkfifo(tmp_path / "other" / "tokenizer.json")
    assert differing_tokens(good, other) is None


@pytest.mark.parametrize("label", ["good", "x" * 300, "good/model.safetensors"])
def test_a_label_in_memory_is_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    import torch

    from isthmus.checkpoints import check_sidecars
    from isthmus.checkpoints.memory import MemoryCheckpoint

    good = model(tmp_path / "good", tokenizer_json=GOOD)
    monkeypatch.chdir(tmp_path)
    memory = MemoryCheckpoint(label, {"a": torch.ones(2)})
    assert memory.path is None
    assert differing_tokens(good, memory) is None
    check_sidecars(memory)
