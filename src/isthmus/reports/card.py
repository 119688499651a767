"""The model card of a merge: what went in, how, and what to know."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


def model_card(
    *,
    title: str,
    method: str,
    reference: str,
    models: Iterable[str],
    base_model: str | None,
    recipe: str,
    dtypes: Mapping[str, int],
    notes: Iterable[str],
    version: str,
    library: str = "transformers",
) -> str:
    """Write a Hub model card in Markdown; its front matter names the models that look like Hub ids.

    Args:
        title: The model's name.
        method: The method's name.
        reference: Its paper.
        models: The experts as the recipe names them.
        base_model: The base as the recipe names it.
        recipe: The recipe as YAML.
        dtypes: How many output tensors have each number format.
        notes: What the user should know.
        version: Of Isthmus.
        library: Which one loads it: transformers, or peft for an adapter.
    """
    names = [*models] if base_model is None else [base_model, *models]
    return render_card(
        "card.md.jinja",
        title=title,
        method=method,
        # "none; ..." says that there is no paper.
        reference=None if reference.startswith("none") else reference,
        models=[one_line(name) for name in models],
        base_model=None if base_model is None else one_line(base_model),
        hub_ids=sorted({name for name in names if is_hub_id(name)}),
        recipe=recipe.rstrip(),
        dtypes=dtypes,
        notes=[one_line(note) for note in notes],
        version=version,
        library=library,
    )


def render_card(template: str, **values: Any) -> str:
    """Fill in one of the Markdown templates."""
    # Markdown, not HTML: what would be escaped here would show its escapes.
    environment = Environment(
        loader=PackageLoader("isthmus.reports"),
        undefined=StrictUndefined,
        autoescape=False,  # noqa: S701
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)


def is_hub_id(name: str) -> bool:
    """Whether a model's name looks like `org/name`."""
    parts = PurePath(name).parts
    return len(parts) == 2 and name == "/".join(parts) and name[0] not in "./~" and "+" not in name


def one_line(text: str) -> str:
    """One line without the characters that would end a code span or open a tag."""
    return " ".join(text.split()).replace("`", "'").replace("<", "‹").replace(">", "›")
