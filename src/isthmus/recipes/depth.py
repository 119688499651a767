"""How deep in its network a tensor lies, told from its name alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

_INDEX = re.compile(r"(?:^|(?<=\.))[0-9]{1,18}(?=\.|\Z)")


class Depths:
    """The depth of every tensor, from 0 for the first layer to 1 for the last.

    The first component of a dotted name that is a number is the index of a layer, and names that
    agree in everything before it form one stack: `model.layers.3.mlp.up_proj.weight` is layer 3
    of the stack `model.layers.`. A stack has as many layers as its largest index says; encoder and
    decoder are two stacks. Every list of modules counts, however short. The only layer of a stack
    has depth 1, and a name without a number (embeddings, final norm, head) depth 0, as in mergekit.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """Count the layers.

        Args:
            names: All tensors of the model, so that the last layer is known.
        """
        places: dict[str, tuple[str, int] | None] = {}
        last: dict[str, int] = {}
        for name in names:
            match = _INDEX.search(name)
            if match is None:
                places[name] = None
                continue
            stack, index = name[: match.start()], int(match.group())
            places[name] = (stack, index)
            last[stack] = max(last.get(stack, 0), index)
        self._depths = {
            name: Fraction(0) if place is None else _share(place[1], last[place[0]])
            for name, place in places.items()
        }

    def of(self, name: str) -> Fraction:
        """The depth of one of the tensors.

        A fraction, not a float: with fifty layers, 49 times 1/49 must be 1 for a list of fifty
        values to give each layer its own.

        Raises:
            KeyError: if the name was not among those given.
        """
        return self._depths[name]


def _share(index: int, last: int) -> Fraction:
    return Fraction(index, last) if last else Fraction(1)
