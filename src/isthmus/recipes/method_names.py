"""Names of methods in recipes: with a space before them, or of mergekit's methods."""

from __future__ import annotations

from isthmus.methods.registry import METHODS

LATER_METHODS = {
    "arcee_fusion",
    "breadcrumbs",
    "breadcrumbs_ties",
    "della",
    "della_linear",
    "karcher",
    "model_stock",
    "multislerp",
    "nearswap",
    "nuslerp",
    "ram",
    "ramplus_tl",
    "sce",
}
"""mergekit's other methods, so that `della_linear` is not taken for a misspelling."""


def space_and_method(name: str) -> tuple[str | None, str]:
    """Space and method of a name such as core_ties; no space in one such as ties."""
    if name in METHODS:
        return None, name
    space, _, rest = name.partition("_")
    return (space, rest) if rest in METHODS and space in METHODS[rest].spaces else (None, name)
