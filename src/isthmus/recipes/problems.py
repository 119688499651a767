"""Collects what is wrong with a recipe, so that one run shows all of it."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from isthmus.errors import RecipeError
from isthmus.recipes.document import Document, KeyPath, show

MOST = 10
"""How many problems one error lists."""


class Problems:
    """The problems of one document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._found: list[tuple[KeyPath, str, str | None]] = []

    def add(self, path: KeyPath, problem: str, cure: str | None = None) -> None:
        """Note a problem.

        Args:
            path: The key that is wrong or missing.
            problem: What is wrong, without the place.
            cure: What to do about it.
        """
        self._found.append((path, problem, cure))

    def knows(self, path: KeyPath, problem: str) -> bool:
        """Whether this very problem was noted there."""
        return any((path, problem) == found[:2] for found in self._found)

    def raise_if_any(self) -> None:
        """Do nothing when the document is sound.

        Raises:
            RecipeError: if there is a problem; lists the first ten, in the order of the file.
        """
        if not self._found:
            return
        found = sorted(self._found, key=lambda item: self._document.line(item[0]) or 0)
        listed = [(self._place(path, problem), cure) for path, problem, cure in found[:MOST]]
        if len(listed) == 1:
            raise RecipeError(*listed[0])
        more = f", the first {MOST} of them" if len(found) > MOST else ""
        lines = [f"{self._document.name} has {len(found)} problems{more}:"]
        lines += [str(RecipeError(problem, cure)) for problem, cure in listed]
        raise RecipeError("\n".join(lines))

    def _place(self, path: KeyPath, problem: str) -> str:
        line = self._document.line(path)
        where = self._document.name if line is None else f"{self._document.name}:{line}"
        return f"{where}: {problem} ({show(path)})"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` is most likely a misspelling of."""
    by_lower = {name.lower(): name for name in known}
    near = get_close_matches(word.lower(), by_lower, n=1)
    return by_lower[near[0]] if near else None
