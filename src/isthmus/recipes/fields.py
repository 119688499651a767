"""A mapping in a recipe as one of our models, with every problem told in plain words."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from isthmus.recipes.document import KeyPath
from isthmus.recipes.problems import Problems, nearest

M = TypeVar("M", bound=BaseModel)


def read_fields(model: type[M], raw: dict[str, Any], path: KeyPath, problems: Problems) -> M | None:
    """The mapping as a model; keys without a value count as absent.

    Args:
        model: Strict, and closed to other keys.
        raw: The mapping.
        path: Where it is; its last key names it.
        problems: Takes what is wrong.

    Returns:
        The model, or None if something is wrong.
    """
    try:
        return model.model_validate({key: value for key, value in raw.items() if value is not None})
    except ValidationError as error:
        for detail in error.errors():
            key, context = str(detail["loc"][0]), detail.get("ctx", {})
            if detail["type"] == "extra_forbidden":
                near = nearest(key, model.model_fields)
                hint = f"did you mean {near!r}?" if near else ""
                known = ", ".join(model.model_fields)
                problems.add(
                    (*path, key),
                    f"unknown key {key!r} of {path[-1]}; {hint or f'known are {known}'}",
                )
                continue
            wanted = {
                "int_type": "a whole number",
                "greater_than_equal": f"{context.get('ge')} or more",
                "less_than": f"below {context.get('lt')}",
                "literal_error": context.get("expected"),
            }.get(detail["type"], "text")
            problems.add((*path, key), f"{key} must be {wanted}, not {detail['input']!r}")
        return None
