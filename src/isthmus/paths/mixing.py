"""Weighted sums of models, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isthmus.errors import PathError

Parameters = Mapping[str, Tensor]
"""A model's tensors under the names of its checkpoint; it may read them when they are asked for."""


def check_names(points: Sequence[Parameters]) -> None:
    """Compare the models' names, which reads no tensor.

    Raises:
        PathError: A model without tensors, or names that only some of the models have.
    """
    if not points[0]:
        raise PathError("The first model has no tensors", "Give every model's tensors by name.")
    for number, point in enumerate(points[1:], start=2):
        for names, verb in (
            (points[0].keys() - point.keys(), "lacks"),
            (point.keys() - points[0].keys(), "has also"),
        ):
            if names:
                first = ", ".join(repr(name) for name in sorted(names)[:3])
                raise PathError(
                    f"Model {number} {verb} {len(names)} tensors, such as {first}",
                    "Models on one path share architecture and naming; tied tensors stand once.",
                )


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least, where it holds floating-point numbers."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def mixed(weights: Sequence[float], points: Sequence[Parameters], name: str) -> Tensor:
    """Σ w_k x_k of one tensor, in float32 at least; what counts or masks comes from the first model.

    A model of weight 0 is not read, so that at an end of a path the numbers are that end's own.

    Args:
        weights: w, one for each model, not all 0.
        points: The models.
        name: Which tensor.

    Raises:
        PathError: Tensors of different shapes.
    """
    used = [(weight, point) for weight, point in zip(weights, points, strict=True) if weight != 0]
    weight, point = used[0]
    tensor = point[name]
    if not tensor.is_floating_point():
        return points[0][name]
    total = wide(tensor) if weight == 1 else wide(tensor) * weight
    for weight, point in used[1:]:
        other = wide(point[name])
        same_shape(name, total, other)
        total = torch.add(total, other, alpha=weight)
    return total


def same_shape(name: str, one: Tensor, other: Tensor) -> None:
    """Compare two models' tensors.

    Raises:
        PathError: They have different shapes.
    """
    if one.shape != other.shape:
        raise PathError(
            f"{name!r} has the shape {list(one.shape)} in one model and {list(other.shape)} in another",
            "Models on one path have equal sizes; extend or crop the vocabulary first if it differs.",
        )
