"""Representatives of least norm, on axes whose groups are not compact."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isthmus.geometry.manifold import GeometryWarning
from isthmus.symmetry.moved import Moved
from isthmus.symmetry.spec import Element, Spec, rows_of

_SETTLED = 1e-8


@dataclass(frozen=True)
class Balanced:
    """A network in balanced coordinates.

    Attributes:
        element: What moved it there: on every axis whose group is not compact, an element.
        parameters: The network after it, computed tensor by tensor when asked for.
        residual: The largest relative change of an axis that should be visited again; 0 if none should.
        converged: The residual is below the tolerance.
    """

    element: Element
    parameters: Mapping[str, Tensor]
    residual: float
    converged: bool


def balance(
    spec: Spec,
    parameters: Mapping[str, Tensor],
    *,
    tolerance: float = _SETTLED,
    sweeps: int = 200,
) -> Balanced:
    """The network of least norm among those that the groups make of it.

    Axis by axis, each at its minimum given the others. The norm is convex along the geodesics of the
    group, so that its minimum is found from anywhere, and unique up to elements that keep all
    norms (Kempf and Ness 1979, The length of vectors in representation spaces). An axis is visited
    again only after another one has moved a tensor that they share.

    Args:
        spec: Where the groups act.
        parameters: The network's tensors; read one at a time.
        tolerance: Largest relative change of an axis that counts as none.
        sweeps: Visits of one axis after which it gives up and warns.
    """
    axes = [axis for axis, group in spec.axes.items() if not group.compact]
    neighbours = _neighbours(spec, axes)
    element: dict[str, Any] = {axis: spec.axes[axis].identity() for axis in axes}
    change = dict.fromkeys(axes, float("inf"))
    waiting = list(axes)
    for _ in range(sweeps):
        visited, waiting = waiting, []
        moved = set()
        for axis in visited:
            group = spec.axes[axis]
            step = group.balance(_squares(spec, element, parameters, axis))
            change[axis] = _change(group, step)
            if change[axis] > tolerance:
                element[axis] = group.compose(step, element[axis])
                moved.add(axis)
        waiting = [axis for axis in axes if neighbours[axis] & moved]
        if not waiting:
            break
    residual = max((change[axis] for axis in waiting), default=0.0)
    if waiting:
        warnings.warn(
            f"Balancing did not converge: the axis {max(waiting, key=lambda axis: change[axis])!r} "
            f"still moved by {residual:.1e}; matching may be less exact",
            GeometryWarning,
            stacklevel=2,
        )
    return Balanced(element, Moved(spec, element, parameters), residual, not waiting)


def _neighbours(spec: Spec, axes: list[str]) -> dict[str, set[str]]:
    """For every axis the others that act on a tensor of its own.

    An axis on two dimensions of one tensor is its own neighbour.
    """
    found: dict[str, set[str]] = {axis: set() for axis in axes}
    for dimensions in spec.tensors.values():
        parts = [{segment.axis for segment in dimension} & set(axes) for dimension in dimensions]
        for i, here in enumerate(parts):
            for j, there in enumerate(parts):
                if i != j:
                    for axis in here:
                        found[axis] |= there
    return found


def _squares(
    spec: Spec, element: Element, parameters: Mapping[str, Tensor], axis: str
) -> dict[str, Tensor]:
    """By role Σ AAᵀ over the tensors on the axis, or its diagonal.

    The axis's own element acts last, on the sum: it is smaller than the tensors.
    """
    group = spec.axes[axis]
    whole = group.balance_needs == "gram"
    squares = {
        role: torch.zeros(*[group.size(role)] * (2 if whole else 1), dtype=torch.float64)
        for role in group.roles
    }
    for name, number, segment in spec.uses(axis):
        others = [i for i in range(len(spec.tensors[name])) if i != number]
        tensor = spec.act_on(element, name, parameters[name].to(torch.float64), others)
        rows = rows_of(tensor, number, segment)
        rows = rows.reshape(rows.shape[0], -1)
        squares[segment.role] += rows @ rows.T if whole else rows.square().sum(dim=1)
    own = element[axis]
    for role, square in squares.items():
        if whole:
            half = group.act(own, square, role)
            squares[role] = group.act(own, half.T, role)
        else:
            # Where the diagonal is enough, balancing elements are diagonal and positive.
            squares[role] = group.act(own, square.sqrt(), role).square()
    return squares


def _change(group: Any, step: Any) -> float:
    """How far an element is from the identity: its largest relative effect on noise."""
    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for role in sorted(group.roles):
        noise = torch.randn(group.size(role), generator=generator, dtype=torch.float64)
        moved = group.act(step, noise, role) - noise
        largest = max(largest, float(moved.norm() / noise.norm()))
    return largest
