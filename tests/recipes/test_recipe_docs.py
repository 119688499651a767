"""The examples of the documentation load, and cover every method and key."""

import re
from pathlib import Path

import pytest

from isthmus.errors import RecipeError
from isthmus.methods.registry import METHODS
from isthmus.recipes import Recipe, load_recipe

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = [
    pytest.param(block, id=f"{page}-{number}")
    for page in ("recipes", "methods")
    for number, block in enumerate(
        re.findall(r"^```yaml\n(.*?)^```", (DOCS / f"{page}.md").read_text("utf-8"), re.M | re.S)
    )
]


@pytest.mark.parametrize("text", EXAMPLES)
def test_example(text):
    recipe = load_recipe(text)
    assert recipe.notes == ()
    assert load_recipe(recipe.to_yaml()) == recipe


def test_every_method_has_a_section():
    headings = re.findall(r"^## (.*)$", (DOCS / "methods.md").read_text("utf-8"), re.M)
    assert ", ".join(headings).split(", ") == list(METHODS)


def test_every_key_is_documented():
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "recipes.md").read_text("utf-8"), re.M)
    assert rows == list(Recipe.model_fields)


def test_the_message_is_the_one_we_give(tmp_path, monkeypatch):
    page = (DOCS / "recipes.md").read_text("utf-8")
    example, message = (
        re.search(rf"^```{kind}\n(.*?)^```", page, re.M | re.S).group(1)
        for kind in ("yaml", "text")
    )
    monkeypatch.chdir(tmp_path)
    Path("merge.yaml").write_text(example.replace("density: 0.2", "densty: 0.2"), "utf-8")
    with pytest.raises(RecipeError) as caught:
        load_recipe("merge.yaml")
    assert str(caught.value) == message.rstrip()
