"""A narrower network inside a wider one: units are added that do nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.errors import SymmetryError
from isthmus.symmetry.heads import Heads
from isthmus.symmetry.spec import Dimension, Segment, Spec

_VARIANCE = "running_var"
"""BatchNorm's, by torch's name; where a unit does nothing it is 1, as in a network that was not trained yet."""


def wider_axes(narrow: Spec, wide: Spec) -> tuple[str, ...]:
    """The axes on which one network has fewer units than the other.

    Args:
        narrow: The symmetries of the narrower network.
        wide: Those of the wider one, with the same axes.

    Raises:
        SymmetryError: The axes are not the same ones; the second network is narrower on one of them; attention heads
            differ; or a norm runs over an axis that would grow, and would see units that do nothing.
    """
    if unlike := narrow.axes.keys() ^ wide.axes.keys():
        raise SymmetryError(
            f"Only one of the networks has the axis {min(unlike)!r}",
            "Networks of unequal width must be of one architecture and depth.",
        )
    return tuple(axis for axis in wide.axes if _grows(axis, narrow, wide))


def _grows(axis: str, narrow: Spec, wide: Spec) -> bool:
    small, large = narrow.axes[axis], wide.axes[axis]
    sizes = [(small.size(role), large.size(role)) for role in sorted(small.roles & large.roles)]
    if all(few == many for few, many in sizes):
        return False
    if isinstance(small, Heads) or isinstance(large, Heads):
        raise SymmetryError(
            f"The attention heads of the axis {axis!r} differ",
            "Only units between layers can be added.",
        )
    few, many = sizes[0]
    if few > many:
        raise SymmetryError(
            f"The axis {axis!r} has {few} units in the one network and {many} in the other, which is to be "
            "wider on every axis",
            "Swap the networks, or make the wider one the reference: the narrower one is moved next to it.",
        )
    for name, _, segment in wide.uses(axis):
        module, _, kind = name.rpartition(".")
        # A gate's matrix is a gain as well, and BatchNorm's looks at no other unit.
        norm = segment.role == "gain" and kind == "weight" and len(wide.tensors[name]) == 1
        if norm and f"{module}.{_VARIANCE}" not in wide.tensors:
            raise SymmetryError(
                f"The axis {axis!r} has {few} units in the one network and {many} in the other, and the norm "
                f"{name!r} runs over it: units that do nothing would change it",
                "Only widths between layers may differ, such as those inside an MLP.",
            )
    return True


def widened(
    narrow: Spec,
    wide: Spec,
    tensors: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, Tensor]:
    """All tensors of the narrower network at the wider one's shapes; it computes the same.

    Args:
        narrow: The symmetries of the narrower network.
        wide: Those of the wider one, with the same axes and names of tensors.
        tensors: Of the narrower network, by name.
        shapes: Of the wider one.

    Raises:
        SymmetryError: As `wider_axes`, or a tensor differs where nothing acts.
    """
    wider_axes(narrow, wide)
    return {
        name: widened_tensor(name, tensor, narrow, wide, shapes[name])
        for name, tensor in tensors.items()
    }


def widened_tensor(
    name: str, tensor: Tensor, narrow: Spec, wide: Spec, shape: Sequence[int]
) -> Tensor:
    """One tensor with zeros for the units that are added, which come last on their axis.

    Nothing reaches such a unit, and nothing reads it, so that the function stays whatever the activation.

    Args:
        name: Of the tensor, in both networks.
        tensor: Of the narrower network.
        narrow: Its symmetries.
        wide: Those of the wider one.
        shape: The tensor's in the wider network.

    Raises:
        SymmetryError: As `growth`.
    """
    fill = 1.0 if name.endswith(_VARIANCE) else 0.0
    for number, places in growth(name, tensor.shape, narrow, wide, shape).items():
        sizes = [*tensor.shape]
        sizes[number] = shape[number]
        tensor = tensor.new_full(sizes, fill).index_copy(number, places, tensor)
    return tensor


def growth(
    name: str, few: Sequence[int], narrow: Spec, wide: Spec, many: Sequence[int]
) -> dict[int, Tensor]:
    """Where the entries of dimensions that grow go, by the dimension's number.

    Args:
        name: Of the tensor, in both networks.
        few: Its shape in the narrower network.
        narrow: The symmetries of that.
        wide: Those of the wider one.
        many: The shape there.

    Raises:
        SymmetryError: A dimension differs where nothing acts.
    """
    if tuple(few) == tuple(many):
        return {}
    own, others = narrow.tensors[name], wide.tensors[name]
    found = {}
    for number, (small, large) in enumerate(zip(few, many, strict=False)):
        if small != large:
            places = _places(own[number], others[number], small, large)
            if places is None:
                break
            found[number] = places
    else:
        if len(few) == len(many):
            return found
    raise SymmetryError(
        f"{name!r} has the shape {list(few)} in the one network and {list(many)} in the other, and not because of "
        "units that could be added",
        "Networks of unequal width must be of one architecture, vocabulary and stream.",
    )


def _places(narrow: Dimension, wide: Dimension, few: int, many: int) -> Tensor | None:
    """Where each of the entries of the narrower dimension goes; None if some go nowhere."""
    places = torch.full((few,), -1)
    if len(narrow) != len(wide):
        return None
    for small, large in zip(narrow, wide, strict=True):
        if (small.axis, small.role, small.inner) != (large.axis, large.role, large.inner):
            return None
        here, there = _entries(small, few), _entries(large, many)
        if len(here) > len(there):
            return None
        places[here] = there[: len(here)]
    return None if (places < 0).any() else places


def _entries(segment: Segment, size: int) -> Tensor:
    every = torch.arange(size)
    return every if segment.positions is None else every[segment.positions]
