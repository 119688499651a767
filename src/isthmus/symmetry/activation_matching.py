"""Matching two networks by what they compute on the same data."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from isthmus.errors import SymmetryError
from isthmus.symmetry.group import Crosses
from isthmus.symmetry.spec import Element, Spec


def match_activations(spec: Spec, crosses: Mapping[str, Tensor | Crosses]) -> Element:
    """The element of every axis that moves b's activations nearest to a's.

    Axes do not depend on each other, so that no descent is needed (Li et al. 2015, Convergent
    learning, arXiv 1511.07543, for units one by one). Elements keep norms; where a group has
    factors too, `match_weights` with this element as `start` and `sweeps=0` balances them.

    Args:
        spec: Where the groups act.
        crosses: By axis Σ h_A h_Bᵀ over samples, a covariance or a correlation: by role, or one matrix
            where activations follow as ``vector``. Axes without one keep the identity.

    Raises:
        SymmetryError: An axis or a role does not exist, or a matrix has the wrong shape or holds NaN or
            infinity.
    """
    element = dict(spec.identity())
    for axis, given in crosses.items():
        group = spec.axes.get(axis)
        if group is None:
            raise SymmetryError(
                f"There are activations on the axis {axis!r}, which has no group",
                f"Axes are: {', '.join(spec.axes)}.",
            )
        by_role = {"vector": given} if isinstance(given, Tensor) else given
        for role, cross in by_role.items():
            if role not in group.roles:
                raise SymmetryError(
                    f"Activations on the axis {axis!r} have the role {role!r}, which {group!r} does "
                    "not know",
                    f"Give crosses by role; its roles are: {', '.join(sorted(group.roles))}.",
                )
            size = group.size(role)
            if cross.shape != (size, size):
                raise SymmetryError(
                    f"The cross of activations on the axis {axis!r} has the shape "
                    f"{list(cross.shape)}, not [{size}, {size}]",
                    "Both networks need the widths of the spec.",
                )
            if not torch.isfinite(cross).all():
                raise SymmetryError(
                    f"Activations on the axis {axis!r} are NaN or infinite",
                    "Run the networks in more digits, or leave out the sample that does it.",
                )
        element[axis] = group.match({role: c.to(torch.float64) for role, c in by_role.items()})
    return element
