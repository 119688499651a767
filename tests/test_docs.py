"""The examples of the documentation run as they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from isthmus.cli.main import app

from .engine.models import family, recipe
from .models.networks import add_tokenizer, saved

ROOT = Path(__file__).parents[1]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with a base, two experts and a recipe, as the pages assume."""
    family(tmp_path, count=2)
    monkeypatch.chdir(tmp_path)
    content = recipe("ties", [Path("expert1"), Path("expert2")], Path("base"))
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content))
    return tmp_path


@pytest.fixture
def calibration(workplace):
    """A model that runs, and a text for it."""
    saved(workplace / "model", "llama", max_position_embeddings=256)
    add_tokenizer(workplace / "model", ("one", "two", "plus", "is"))
    lines = ['{"question": "one plus two", "answer": 3}', '{"question": "two plus is one"}']
    (workplace / "problems.jsonl").write_text("\n".join(lines))


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize(
    "page",
    [
        "docs/python.md",
        "docs/geometry.md",
        "docs/extract.md",
        "docs/adapters.md",
        "docs/projection.md",
        "docs/optimizers.md",
        "docs/noise.md",
        "docs/advise.md",
        "docs/sweeps.md",
        "docs/two-layer.md",
        "docs/align.md",
        "docs/connect.md",
        "README.md",
    ],
)
@pytest.mark.usefixtures("workplace")
def test_python_examples(page):
    examples = blocks(page, "python")
    assert examples
    for example in examples:
        exec(compile(example, page, "exec"), {})


@pytest.mark.parametrize(
    "page", ["docs/engine.md", "docs/inspect.md", "docs/extract.md", "README.md"]
)
@pytest.mark.usefixtures("workplace")
def test_console_examples(page):
    lines = [line for block in blocks(page, "console") for line in block.splitlines()]
    commands = [line.removeprefix("$ isthmus ") for line in lines if line.startswith("$ isthmus ")]
    assert commands
    for command in commands:
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, (command, result.output, result.exception)


@pytest.mark.usefixtures("calibration")
def test_calibration_examples():
    (command,) = re.findall(r"\$ isthmus (.*)", blocks("docs/calibration.md", "console")[0])
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, (result.output, result.exception)
    for example in blocks("docs/calibration.md", "python"):
        exec(compile(example, "docs/calibration.md", "exec"), {})


@pytest.fixture
def language_models(tmp_path, monkeypatch):
    """Two models that were trained apart, and texts."""
    for name, seed in (("model-a", 0), ("model-b", 1)):
        torch.manual_seed(seed)
        saved(tmp_path / name, "llama", max_position_embeddings=256)
        add_tokenizer(tmp_path / name, ("one", "two", "plus", "is"))
    texts = [f"one plus {'two plus ' * number}two is one" for number in range(1, 9)]
    (tmp_path / "texts.jsonl").write_text("\n".join(f'{{"text": "{text}"}}' for text in texts))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", ["docs/align.md", "docs/connect.md", "docs/noise.md"])
@pytest.mark.usefixtures("language_models")
def test_examples_with_language_models(page):
    (command,) = re.findall(r"\$ isthmus (.*)", blocks(page, "console")[0])
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, (result.output, result.exception)


@pytest.mark.usefixtures("language_models")
def test_a_recipe_that_aligns():
    Path("recipe.yaml").write_text(blocks("docs/align.md", "yaml")[0])
    result = CliRunner().invoke(app, ["merge", "recipe.yaml", "aligned"])
    assert result.exit_code == 0, (result.output, result.exception)


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs").glob("*.md")):
        assert f"docs/{page.name}" in readme, page.name
    for target in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / target).is_file(), target
