"""Which groups act on a network, and on which dimensions of its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isthmus.errors import SymmetryError
from isthmus.symmetry.group import Group

Element = Mapping[str, Any]
"""An element of the whole group: one of its own for every axis."""


@dataclass(frozen=True, eq=False)
class Segment:
    """A part of a dimension that lies on an axis.

    Attributes:
        axis: The axis's name.
        role: How it follows the group; see `Group`.
        positions: Where in the dimension the part lies: a slice, or indices [n] in the order of the axis;
            all of it if None.
        inner: Consecutive positions that belong to one entry of the axis, such as the pixels of a channel
            where an image was flattened.
    """

    axis: str
    role: str = "vector"
    positions: slice | Tensor | None = None
    inner: int = 1


Dimension = tuple[Segment, ...]
"""The parts of one dimension; no part: nothing acts on it."""


def on(axis: str, role: str = "vector", inner: int = 1) -> Dimension:
    """A dimension that lies on an axis as a whole."""
    return (Segment(axis, role, inner=inner),)


FREE: Dimension = ()
"""A dimension on which nothing acts."""


@dataclass(frozen=True, eq=False)
class Site:
    """Where coordinates on an axis can be seen while a network runs.

    Attributes:
        module: A module's name. If its output is a tuple, the first part counts.
        role: How these coordinates follow the group.
        positions: Where in the dimension they lie; all of it if None.
        dimension: Which dimension of the output: the last one, or 1 for channels of images.
    """

    module: str
    role: str = "vector"
    positions: slice | Tensor | None = None
    dimension: int = -1


@dataclass(frozen=True)
class Spec:
    """The symmetries of an architecture.

    Dimensions with the same axis transform together; that is what a residual stream is (Ainsworth,
    Hayase and Srinivasa 2023, Git Re-Basin, arXiv 2209.04836, for permutations).

    Attributes:
        axes: The group of every axis.
        tensors: For every tensor of the network its dimensions. Tensors on which nothing acts are listed
            too, so that none is forgotten.
        sites: For some axes where its coordinates can be seen, for matching by activations.
    """

    axes: Mapping[str, Group[Any]]
    tensors: Mapping[str, Sequence[Dimension]]
    sites: Mapping[str, Sequence[Site]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, dimensions in self.tensors.items():
            for segment in (part for dimension in dimensions for part in dimension):
                group = self.axes.get(segment.axis)
                if group is None:
                    raise SymmetryError(
                        f"The tensor {name!r} lies on the axis {segment.axis!r}, which has no group",
                        f"Axes with a group are: {', '.join(self.axes)}.",
                    )
                if segment.role not in group.roles:
                    raise SymmetryError(
                        f"The tensor {name!r} has the role {segment.role!r} on the axis "
                        f"{segment.axis!r}, which {group!r} does not know",
                        f"Its roles are: {', '.join(sorted(group.roles))}.",
                    )

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Compare with the shapes of a network's tensors.

        Raises:
            SymmetryError: naming a tensor that is missing, unknown or of another shape.
        """
        for names, verb in (
            (self.tensors.keys() - shapes.keys(), "lacks"),
            (shapes.keys() - self.tensors.keys(), "has also"),
        ):
            if names:
                first = ", ".join(repr(name) for name in sorted(names)[:3])
                raise SymmetryError(
                    f"The spec does not fit: the network {verb} {len(names)} tensors, such as {first}",
                    "Its spec belongs to another architecture or another naming.",
                )
        for name, dimensions in self.tensors.items():
            shape = tuple(shapes[name])
            fits = len(shape) == len(dimensions) and all(
                self._length(segment, size)
                for dimension, size in zip(dimensions, shape, strict=True)
                for segment in dimension
            )
            if not fits:
                raise SymmetryError(
                    f"The spec does not fit: {name!r} has the shape {list(shape)}",
                    "Its spec belongs to a network of another size.",
                )

    def _length(self, segment: Segment, size: int) -> bool:
        wanted = self.axes[segment.axis].size(segment.role) * segment.inner
        places = segment.positions
        if places is None:
            return wanted == size
        if isinstance(places, slice):
            return wanted == len(range(*places.indices(size)))
        return wanted == len(places) and int(places.max()) < size

    def identity(self) -> Element:
        """The element that changes nothing."""
        return {axis: group.identity() for axis, group in self.axes.items()}

    def random(self, generator: torch.Generator) -> Element:
        """Independent random elements on all axes."""
        return {axis: group.random(generator) for axis, group in self.axes.items()}

    def compose(self, g: Element, h: Element) -> Element:
        """The element that acts as h and then g."""
        return {axis: group.compose(g[axis], h[axis]) for axis, group in self.axes.items()}

    def inverse(self, g: Element) -> Element:
        """The element that undoes g."""
        return {axis: group.inverse(g[axis]) for axis, group in self.axes.items()}

    def act(self, g: Element, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All tensors after g; they keep their dtypes, computed in float32 at least."""
        return {name: self.act_on(g, name, tensor) for name, tensor in tensors.items()}

    def act_on(
        self, g: Element, name: str, tensor: Tensor, dimensions: Collection[int] | None = None
    ) -> Tensor:
        """One tensor after g.

        Args:
            g: An element; on axes that it lacks nothing acts.
            name: The tensor's name.
            tensor: The tensor.
            dimensions: The numbers of those that follow; all if None.

        Raises:
            SymmetryError: The spec does not know the tensor.
        """
        if name not in self.tensors:
            raise SymmetryError(
                f"The spec does not know the tensor {name!r}",
                "Every tensor must be listed, also where nothing acts on it.",
            )
        wide = tensor
        if tensor.is_floating_point():
            wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        for number, dimension in enumerate(self.tensors[name]):
            if dimensions is not None and number not in dimensions:
                continue
            for segment in dimension:
                if segment.axis in g:
                    wide = self._act_on_segment(g[segment.axis], wide, number, segment)
        return wide.to(tensor.dtype)

    def _act_on_segment(self, g: Any, tensor: Tensor, number: int, segment: Segment) -> Tensor:
        rows = rows_of(tensor, number, segment)
        acted = self.axes[segment.axis].act(g, rows, segment.role).reshape(-1, *rows.shape[2:])
        if segment.positions is None:
            return acted.movedim(0, number)
        result = tensor.clone()
        result.movedim(number, 0)[segment.positions] = acted
        return result

    def uses(self, axis: str) -> Iterator[tuple[str, int, Segment]]:
        """Every part of a tensor on an axis: the tensor's name, the dimension's number, the part."""
        for name, dimensions in self.tensors.items():
            for number, dimension in enumerate(dimensions):
                for segment in dimension:
                    if segment.axis == axis:
                        yield name, number, segment

    def restricted(self, axes: Iterable[str]) -> Spec:
        """The same tensors with the groups of some axes alone; nothing acts on the others."""
        kept = set(axes)
        return Spec(
            {axis: group for axis, group in self.axes.items() if axis in kept},
            {
                name: tuple(
                    tuple(segment for segment in dimension if segment.axis in kept)
                    for dimension in dimensions
                )
                for name, dimensions in self.tensors.items()
            },
            {axis: sites for axis, sites in self.sites.items() if axis in kept},
        )


def rows_of(tensor: Tensor, number: int, segment: Segment) -> Tensor:
    """The part of a dimension as rows: shape [n, inner, other dimensions...]."""
    rows = tensor.movedim(number, 0)
    if segment.positions is not None:
        rows = rows[segment.positions]
    return rows.reshape(-1, segment.inner, *rows.shape[1:])
