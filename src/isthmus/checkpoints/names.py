"""Tensors that are the same though one model's names carry a prefix that another's lack."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

PREFIXES = (
    "_orig_mod.",
    "base_model.",
    "bert.",
    "deberta.",
    "distilbert.",
    "electra.",
    "language_model.",
    "model.",
    "module.",
    "roberta.",
    "transformer.",
)
"""Prefixes that frameworks put before the names of a model inside another one."""


def align_names(reference: Collection[str], other: Collection[str]) -> dict[str, str]:
    """Find each of the reference's tensors in another model.

    A name that both have stands for itself. Of the rest, two names belong together when they are
    equal without their leading `PREFIXES`, and nothing else on either side is equal to them.

    Args:
        reference: The names of one model.
        other: The names of another.

    Returns:
        The reference's names, in order, and the other's name for each. Those that the other
        model lacks are left out. No two names lead to the same one.

    Example:
        >>> align_names(["bert.pooler.bias", "cls.bias"], ["pooler.bias", "cls.bias"])
        {'bert.pooler.bias': 'pooler.bias', 'cls.bias': 'cls.bias'}
    """
    others = set(other)
    shared = others.intersection(reference)
    ours = _by_bare_name(name for name in reference if name not in shared)
    theirs = _by_bare_name(others - shared)
    aliases = {
        names[0]: theirs[bare][0]
        for bare, names in ours.items()
        if len(names) == 1 and len(theirs.get(bare, ())) == 1
    }
    aligned = {name: name if name in shared else aliases.get(name) for name in reference}
    return {name: found for name, found in aligned.items() if found is not None}


def _by_bare_name(names: Iterable[str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[_bare(name)].append(name)
    return dict(groups)


def _bare(name: str) -> str:
    """The name without any of its leading prefixes."""
    while prefix := next(filter(name.startswith, PREFIXES), None):
        name = name.removeprefix(prefix)
    return name
