"""Two networks in coordinates in which matching them is a matter of norms."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from isthmus.errors import SymmetryError
from isthmus.symmetry.balance import balance
from isthmus.symmetry.moved import Moved
from isthmus.symmetry.spec import Element, Segment, Spec, rows_of


class Pair:
    """Two networks, both in balanced coordinates, and an element that moves one towards the other.

    Args:
        spec: Where the groups act.
        a: Tensors of the network that stays.
        b: Tensors of the one that moves.
        axes: Those on which it may.
        start: Where it is; as it is if None.
        balanced: Whether to balance them; if not, both stay in their own coordinates.

    Raises:
        SymmetryError: As in `match_weights`.
    """

    def __init__(
        self,
        spec: Spec,
        a: Mapping[str, Tensor],
        b: Mapping[str, Tensor],
        *,
        axes: Collection[str] | None = None,
        start: Element | None = None,
        balanced: bool = True,
    ) -> None:
        self.whole, self.a, self.b = spec, a, b
        self.begin: Element = {**spec.identity(), **(start or {})}
        self.spec = spec if axes is None else spec.restricted(_known(spec, axes))
        self.shapes = checked_pair(spec, a, b)
        held = {axis: self.begin[axis] for axis in spec.axes if axis not in self.spec.axes}
        moved = Moved(spec, held, b) if start is not None and held else b
        self.frame_a = balance(self.spec, a).element if balanced else {}
        self.frame_b = balance(self.spec, moved).element if balanced else {}
        self.still = Moved(self.spec, self.frame_a, a, least=torch.float32)
        self.moving = moved
        self.norms = math.sqrt(
            _square(self.still, self.shapes)
            * _square(Moved(self.spec, self.frame_b, moved), self.shapes)
        )

    def start(self) -> dict[str, Any]:
        """Where the descent begins: elements that keep norms, between balanced coordinates."""
        found = {}
        for axis, group in self.spec.axes.items():
            g = self.begin[axis]
            if not group.compact:
                if axis in self.frame_a:
                    g = group.compose(self.frame_a[axis], g)
                    g = group.compose(g, group.inverse(self.frame_b[axis]))
                g = group.match(
                    {
                        role: group.act(g, torch.eye(group.size(role), dtype=torch.float64), role)
                        for role in group.roles
                    }
                )
            found[axis] = g
        return found

    def full(self, element: Element) -> dict[str, Any]:
        """Balancing b, and then the element."""
        return {
            axis: self.spec.axes[axis].compose(g, self.frame_b[axis]) if axis in self.frame_b else g
            for axis, g in element.items()
        }

    def in_own_coordinates(self, element: Element) -> Element:
        """The element from b as it is to a as it is, on all axes."""
        own = dict(self.begin)
        for axis, g in self.full(element).items():
            group = self.spec.axes[axis]
            back = self.frame_a.get(axis)
            own[axis] = g if back is None else group.compose(group.inverse(back), g)
        return own

    def cosine(self, element: Element) -> float:
        """⟨a, g b⟩ / ‖a‖‖b‖ in balanced coordinates."""
        return self.inner(element, self.shapes) / self.norms if self.norms else 1.0

    def inner(self, element: Element, names: Collection[str]) -> float:
        """⟨a, g b⟩ over some tensors, in balanced coordinates."""
        moved = Moved(self.spec, self.full(element), self.moving)
        return sum(
            float((self.still[name] * moved[name]).sum(dtype=torch.float64)) for name in names
        )

    def distance(self, element: Element) -> float:
        """‖a − g b‖ / ‖a‖ for an element between the networks as they are."""
        moved = Moved(self.whole, element, self.b, least=torch.float32)
        missed = norm = 0.0
        for name in self.shapes:
            tensor = self.a[name].to(torch.float64)
            missed += float((tensor - moved[name]).square().sum())
            norm += float(tensor.square().sum())
        return math.sqrt(missed / norm) if norm else math.sqrt(missed)

    def crosses(
        self, element: Element, axis: str, settled: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """Σ ABᵀ by role over the tensors on an axis, b moved everywhere but on this axis.

        Products are taken in the dtype of the tensors, float32 at least, and added in float64: an
        assignment or a polar factor of a sum of thousands of products does not feel the last digits
        of each, and float64 products would take twice the time.

        Args:
            element: Where b is.
            axis: The axis.
            settled: Axes whose elements count; a tensor that lies on others too is left out. All
                count if None.
        """
        group, full = self.spec.axes[axis], self.full(element)
        own = {axis: self.frame_b[axis]} if axis in self.frame_b else {}
        crosses: dict[str, Tensor] = {}
        for name, number, segments in self.uses(axis):
            others = [i for i in range(len(self.spec.tensors[name])) if i != number]
            if settled is not None and not self._settled(name, others, settled):
                continue
            still = self.still[name]
            moving = self.spec.act_on(full, name, self.moving[name], others)
            moving = self.spec.act_on(own, name, moving, [number])
            wide = torch.promote_types(still.dtype, moving.dtype)
            for segment in segments:
                rows, columns = (
                    rows_of(tensor, number, segment).flatten(1).to(wide)
                    for tensor in (still, moving)
                )
                product = (rows @ columns.T).to(torch.float64)
                if segment.role in crosses:
                    product += crosses[segment.role]
                crosses[segment.role] = product
        if not crosses and settled is None:
            zero = torch.zeros(1, dtype=torch.float64)
            crosses = {role: zero.expand(*[group.size(role)] * 2) for role in group.roles}
        return crosses

    def uses(self, axis: str) -> list[tuple[str, int, list[Segment]]]:
        """Dimensions on an axis: the tensor's name, the number, the parts on the axis."""
        found: dict[tuple[str, int], list[Segment]] = {}
        for name, number, segment in self.spec.uses(axis):
            if name in self.shapes:
                found.setdefault((name, number), []).append(segment)
        return [(name, number, segments) for (name, number), segments in found.items()]

    def _settled(self, name: str, dimensions: list[int], settled: Collection[str]) -> bool:
        return all(
            segment.axis in settled
            for number in dimensions
            for segment in self.spec.tensors[name][number]
        )

    def evidence(self, axis: str, settled: Collection[str]) -> int:
        """How many numbers of each unit of an axis can be compared once others are settled."""
        total = 0
        for name, number, _ in self.uses(axis):
            shape = self.shapes[name]
            others = [i for i in range(len(shape)) if i != number]
            if self._settled(name, others, settled):
                total += math.prod(shape[i] for i in others)
        return total

    def repeated(self, axis: str) -> set[str]:
        """Tensors that lie on an axis with two dimensions: their share is quadratic."""
        names = [name for name, _, _ in self.uses(axis)]
        return {name for name in names if names.count(name) > 1}


def _known(spec: Spec, axes: Collection[str]) -> Collection[str]:
    for axis in axes:
        if axis not in spec.axes:
            raise SymmetryError(
                f"There is no axis {axis!r} to match",
                f"Axes are: {', '.join(spec.axes)}.",
            )
    return axes


def checked_pair(
    spec: Spec, a: Mapping[str, Tensor], b: Mapping[str, Tensor]
) -> dict[str, tuple[int, ...]]:
    """The shapes of all floating-point tensors of two networks that can be matched.

    Raises:
        SymmetryError: The spec does not fit, or a tensor differs in shape or holds NaN or infinity.
    """
    shapes = {}
    for name in spec.tensors:
        tensors = []
        for model, which in ((a, "first"), (b, "second")):
            if name not in model:
                raise SymmetryError(
                    f"The {which} network has no tensor {name!r}, which the spec knows",
                    "Match networks of one architecture, with its spec.",
                )
            tensors.append(model[name])
        if tensors[0].shape != tensors[1].shape:
            raise SymmetryError(
                f"The tensor {name!r} has the shape {list(tensors[0].shape)} in the first network "
                f"and {list(tensors[1].shape)} in the second",
                "Matching by weights needs networks of the same widths.",
            )
        if not tensors[0].is_floating_point():
            continue
        for tensor, which in zip(tensors, ("first", "second"), strict=True):
            if not torch.isfinite(tensor).all():
                raise SymmetryError(
                    f"The tensor {name!r} of the {which} network holds NaN or infinity",
                    "Nothing can be matched to that; check the file.",
                )
        shapes[name] = tuple(tensors[0].shape)
    spec.check({name: tuple(a[name].shape) for name in a})
    return shapes


def _square(tensors: Mapping[str, Tensor], names: Collection[str]) -> float:
    return sum(float(tensors[name].to(torch.float64).square().sum()) for name in names)
