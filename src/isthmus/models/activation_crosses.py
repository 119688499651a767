"""How the activations of two networks go together on the same data, axis by axis."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isthmus.errors import SymmetryError
from isthmus.models.functional import Batch, NetworkFunction
from isthmus.paths.mixing import Parameters
from isthmus.symmetry.spec import Site, Spec

Kind = Literal["covariance", "correlation"]


def activation_crosses(
    module: nn.Module,
    spec: Spec,
    a: Parameters,
    b: Parameters,
    batches: Iterable[Batch],
    *,
    kind: Kind = "covariance",
) -> dict[str, dict[str, Tensor]]:
    """By axis and role Σ (h_A − mean)(h_B − mean)ᵀ over the data, for `match_activations`.

    Covariances count strong units more, correlations all alike (Li et al. 2015, Convergent learning,
    arXiv 1511.07543). Products are taken in the dtype of the activations and added in float64. Padding
    counts as all else does.

    Args:
        module: The architecture.
        spec: Its `sites` say where coordinates on an axis are seen.
        a: Tensors of one network.
        b: Those of the other.
        batches: Data, gone through once; labels are not used.
        kind: What goes together.

    Returns:
        Matrices [n, n], float64. Several sites of an axis and role are added.

    Raises:
        SymmetryError: No site, a module that does not exist or is not run, or no data.
    """
    sites = [(axis, site) for axis, places in spec.sites.items() for site in places]
    if not sites:
        raise SymmetryError(
            "The spec names no module whose outputs lie on an axis",
            "Give it sites=, or match by weights.",
        )
    known = dict(module.named_modules())
    for axis, site in sites:
        if site.module not in known:
            raise SymmetryError(
                f"The axis {axis!r} is to be seen at {site.module!r}, which "
                f"{type(module).__name__} does not have",
                "Name modules as module.named_modules() gives them.",
            )
    function = NetworkFunction(module)
    sums = [_Cross() for _ in sites]
    seen: dict[str, Tensor] = {}

    def hear(name: str, answer: Any) -> None:
        seen[name] = (answer[0] if isinstance(answer, tuple) else answer).detach()

    with torch.no_grad(), ExitStack() as hooks:
        for name in {site.module for _, site in sites}:

            def hook(_module: Any, _given: Any, answer: Any, name: str = name) -> None:
                hear(name, answer)

            hooks.callback(known[name].register_forward_hook(hook).remove)
        for batch in batches:
            rows: list[list[Tensor]] = []
            for parameters in (a, b):
                seen.clear()
                function.outputs(parameters, batch)
                rows.append([_rows(seen, axis, site) for axis, site in sites])
            for cross, one, other in zip(sums, *rows, strict=True):
                cross.add(one, other)
    found: dict[str, dict[str, Tensor]] = {}
    for (axis, site), cross in zip(sites, sums, strict=True):
        value = cross.centred(axis, kind)
        roles = found.setdefault(axis, {})
        roles[site.role] = roles[site.role] + value if site.role in roles else value
    return found


def _rows(seen: dict[str, Tensor], axis: str, site: Site) -> Tensor:
    """Activations [samples, n] at a site."""
    if site.module not in seen:
        raise SymmetryError(
            f"The module {site.module!r}, where the axis {axis!r} is to be seen, is not run",
            "Name another module in the spec's sites.",
        )
    values = seen[site.module].movedim(site.dimension, -1)
    if site.positions is not None:
        values = values[..., site.positions]
    return values.reshape(-1, values.shape[-1])


class _Cross:
    """Σ h_A h_Bᵀ, and what centring and scaling take."""

    def __init__(self) -> None:
        self._count = 0
        self._product: Tensor | float = 0.0
        self._sums: list[Tensor | float] = [0.0, 0.0]
        self._squares: list[Tensor | float] = [0.0, 0.0]

    def add(self, one: Tensor, other: Tensor) -> None:
        """Activations of both networks on the same samples."""
        self._count += len(one)
        self._product = self._product + (one.T @ other).double()
        for number, rows in enumerate((one, other)):
            wide = rows.double()
            self._sums[number] = self._sums[number] + wide.sum(dim=0)
            self._squares[number] = self._squares[number] + wide.square().sum(dim=0)

    def centred(self, axis: str, kind: Kind) -> Tensor:
        """The covariance times the number of samples, or the correlation."""
        if not self._count:
            raise SymmetryError(
                f"There is no data on which the axis {axis!r} could be seen",
                "Give a batch at least.",
            )
        first, second = (torch.as_tensor(total) / self._count for total in self._sums)
        covariance = torch.as_tensor(self._product) - self._count * torch.outer(first, second)
        if kind == "covariance":
            return covariance
        sizes = [
            (torch.as_tensor(square) - self._count * mean.square()).clamp(min=0).sqrt()
            for square, mean in zip(self._squares, (first, second), strict=True)
        ]
        scale = torch.outer(*sizes)
        # A unit that never changes goes with none.
        return torch.where(scale > 0, covariance / torch.where(scale > 0, scale, 1.0), 0.0)
