"""How one network moves next to another: by weights, by activations, or by the loss on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from isthmus.models.activation_crosses import activation_crosses
from isthmus.models.functional import NetworkFunction
from isthmus.symmetry.activation_matching import match_activations
from isthmus.symmetry.learned import match_learned
from isthmus.symmetry.matching import Matching, match_weights
from isthmus.symmetry.spec import Spec

Batch = Mapping[str, Tensor]
By = Literal["weights", "activations", "learned"]

Told = Callable[[str, int, int], None]
"""Told of progress: what is being done, how much of it is done, of how much."""


def matched(
    by: By,
    network: nn.Module,
    spec: Spec,
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    batches: Sequence[Batch],
    *,
    axes: Collection[str] | None = None,
    steps: int = 100,
    seed: int = 0,
    told: Told = lambda _what, _done, _total: None,
) -> Matching:
    """The element that moves b next to a.

    Args:
        by: ``weights``; ``activations``, correlated over the data; or ``learned``: from the match by weights,
            what lowers the loss between the two.
        network: The architecture, with the names that `spec` has.
        spec: Where the groups act; its sites say where activations are seen.
        a: Tensors of the network that stays, in memory.
        b: Tensors of the one that moves, in memory.
        batches: Data; not used for ``weights``.
        axes: Those to match; all if None.
        steps: Of learning.
        seed: Decides the order of axes, and the batches of steps.
        told: Told of progress.

    Raises:
        SymmetryError: The spec does not fit, has no sites where activations are asked for, or there is no data.
        PathError: The network has no loss on the data.
    """
    if by == "activations":
        told("activations", 0, 1)
        crosses = activation_crosses(network, spec, a, b, batches, kind="correlation")
        chosen = {axis: one for axis, one in crosses.items() if axes is None or axis in axes}
        start = match_activations(spec, chosen)
        return match_weights(spec, a, b, axes=axes, start=start, sweeps=0)
    visits = 0
    count = len(spec.axes if axes is None else axes)

    def visited(_sweep: int, _axis: str) -> None:
        nonlocal visits
        told("matching weights", visits % count, count)
        visits += 1

    found = match_weights(spec, a, b, axes=axes, seed=seed, progress=visited)
    if by == "weights":
        return found
    function = NetworkFunction(network)
    draw = Draw(batches, seed)
    learned = match_learned(
        spec,
        a,
        b,
        lambda parameters, step: function.loss(parameters, draw(step)),
        start=found.element,
        steps=steps,
        evaluate=lambda parameters: function.evaluate(parameters, batches)["loss"],
        axes=axes,
        seed=seed,
        progress=lambda step, _loss: told("learning the alignment", step, steps),
    )
    return replace(found, element=learned.element, distance=learned.distance)


class Draw:
    """A batch for every step, drawn from its number.

    Args:
        batches: To draw from.
        seed: Decides, with the number of the step.
    """

    def __init__(self, batches: Sequence[Batch], seed: int) -> None:
        self._batches, self._seed = batches, seed

    def __call__(self, step: int) -> Batch:
        """The batch of a step, the same every time."""
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + step)
        return self._batches[int(torch.randint(len(self._batches), (), generator=generator))]
