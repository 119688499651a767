"""Reading a recipe from a file, from text or from Python data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isthmus.errors import RecipeError
from isthmus.recipes.check import check_recipe
from isthmus.recipes.document import Document, parse_document, plain_document
from isthmus.recipes.schema import Recipe


def load_recipe(
    source: Path | str | Mapping[str, Any], *, overrides: Mapping[str, Any] | None = None
) -> Recipe:
    """Read a recipe and check all that can be known without opening a model.

    Args:
        source: A file; or YAML text, which is text with a line break; or what YAML would hold.
        overrides: Replaces entries of the top level, such as `{"seed": 1}`.

    Returns:
        The recipe. Its `root` is the folder of the file, or None.

    Raises:
        RecipeError: if the file cannot be read or anything in it is wrong; lists every problem
            with file, line, key and cure.
    """
    if isinstance(source, Mapping):
        document, root = plain_document(source, "recipe"), None
    elif isinstance(source, str) and "\n" in source:
        document, root = parse_document(source, "recipe"), None
    else:
        document, root = parse_document(_read(Path(source)), str(source)), Path(source).parent
    if overrides:
        document = _overridden(document, plain_document(overrides, "overrides"))
    return check_recipe(document, root)


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except IsADirectoryError as error:
        raise RecipeError(
            f"{path} is a folder, but a recipe file is expected here",
            "Write a YAML file that names the folder as a model: `models:` and below it "
            f"`- model: {path}`.",
        ) from error
    except ValueError as error:
        if isinstance(error, UnicodeDecodeError):
            raise RecipeError(f"{path}: this is not text in UTF-8") from error
        raise RecipeError(f"{str(path)!r} cannot be the name of a file") from error
    except FileNotFoundError as error:
        raise RecipeError(f"there is no recipe {path}") from error
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from error


def _overridden(document: Document, overrides: Document) -> Document:
    lines = {path: line for path, line in document.lines.items() if path[0] not in overrides.data}
    return Document(document.name, document.data | overrides.data, lines)
