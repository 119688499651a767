"""Tensors after an element of the group, computed when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from isthmus.symmetry.spec import Element, Spec


class Moved(Mapping[str, Tensor]):
    """The tensors of a network after g, one at a time.

    Args:
        spec: Where the groups act.
        element: g; on axes that it lacks nothing acts.
        tensors: The network's, possibly read only when asked for.
        least: Tensors of fewer digits than this dtype come back in it; None keeps every dtype.
    """

    def __init__(
        self,
        spec: Spec,
        element: Element,
        tensors: Mapping[str, Tensor],
        *,
        least: torch.dtype | None = None,
    ) -> None:
        self.spec = spec
        self.element = element
        self.tensors = tensors
        self.least = least

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        if self.least is not None and tensor.is_floating_point():
            tensor = tensor.to(torch.promote_types(tensor.dtype, self.least))
        return self.spec.act_on(self.element, name, tensor)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)
