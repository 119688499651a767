"""What all merges on calibration data are tested with."""

from __future__ import annotations

import json

import pytest
import torch

from tests.models.networks import add_tokenizer, build

from .models import KINDS, WORDS, near, texts


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """By kind of network: a folder with `base`, `one`, `two`, and their examples."""
    root = tmp_path_factory.mktemp("families")
    for kind in KINDS:
        for name, seed in (("base", None), ("one", 1), ("two", 2)):
            network = build(kind)
            folder = root / kind / name
            (network if seed is None else near(network, seed)).save_pretrained(folder)
            add_tokenizer(folder, WORDS)
    for seed, name in enumerate(("one", "two")):
        lines = [json.dumps({"text": text}) for text in texts(seed)]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
    return root
