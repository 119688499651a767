"""A merge that dies by kill -9 goes on with --resume and ends in the same bytes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from .models import contents, write_model

TENSORS = 40


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models large enough that a merge can be caught in the middle of its work."""
    folder = tmp_path_factory.mktemp("models")
    draw = torch.Generator().manual_seed(0)
    base = {f"{i}.weight": torch.randn(512, 512, generator=draw) for i in range(TENSORS)}
    experts = [
        {name: value + 0.1 * torch.randn(512, 512, generator=draw) for name, value in base.items()}
        for _ in range(2)
    ]
    paths = [
        write_model(folder / name, state)
        for name, state in zip(("base", "one", "two"), (base, *experts), strict=True)
    ]
    path = folder / "recipe.yaml"
    content = {
        # The model card has the folder's name when the recipe has none.
        "name": "killed",
        "merge_method": "dare_ties",
        "base_model": str(paths[0]),
        "models": [{"model": str(expert)} for expert in paths[1:]],
        "parameters": {"weight": 1, "density": 0.3},
    }
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def start(recipe: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Begins a merge in a process of its own."""

    def begin(out: Path, *more: str) -> subprocess.Popen[bytes]:
        options = ["--max-shard-size", "10MB", "--workers", "2", *more]
        return subprocess.Popen(
            [sys.executable, "-m", "isthmus", "merge", recipe, out, *options],
            stdout=subprocess.DEVNULL,
        )

    return begin


@pytest.fixture(scope="module")
def undisturbed(
    start: Callable[..., subprocess.Popen[bytes]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    assert start(out).wait() == 0
    return contents(out)


@pytest.mark.slow
@pytest.mark.parametrize("written", [0, TENSORS // 3, TENSORS // 2])
def test_a_killed_merge_resumes_to_the_same_bytes(
    written: int,
    start: Callable[..., subprocess.Popen[bytes]],
    undisturbed: dict[str, bytes],
    tmp_path: Path,
) -> None:
    out = tmp_path / "out"
    journal = out / ".isthmus" / "journal.jsonl"
    process = start(out)
    while process.poll() is None and not (
        journal.exists() and journal.read_bytes().count(b'"tensors"') >= written
    ):
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -9, "the merge ended before it could be killed"
    assert not list(out.glob("*.safetensors")), "nothing may be in place yet"

    assert start(out, "--resume").wait() == 0
    assert contents(out) == undisturbed
