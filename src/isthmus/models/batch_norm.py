"""What mixing does to activations, undone: statistics of BatchNorm anew, and REPAIR (Jordan et al. 2023, arXiv 2211.08403)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isthmus.errors import PathError
from isthmus.models.functional import Batch, NetworkFunction
from isthmus.paths.mixing import Parameters, wide

_Norm = nn.modules.batchnorm._BatchNorm
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ROUNDING = 1e-6
"""Share of a channel's size below which its spread is rounding, and is not scaled up."""


def has_batch_norm(module: nn.Module) -> bool:
    """Whether the network has BatchNorm with running statistics."""
    return bool(_norms(module))


def reset_statistics(
    module: nn.Module, parameters: Parameters, batches: Iterable[Batch]
) -> dict[str, Tensor]:
    """The same tensors with the running statistics of BatchNorm measured anew.

    One pass, as in training: every layer normalises by the batch. Its new mean and (unbiased) variance
    are those of all that entered it in all batches together. Large batches make normalising by the batch
    and by the whole data more alike.

    Args:
        module: The network; it is not changed.
        parameters: By the names of its `state_dict`.
        batches: Data of the training's distribution; labels are not used.

    Raises:
        PathError: No BatchNorm with running statistics, no data, a single value a channel, or statistics
            that are not finite.
    """
    norms = _norms(module)
    if not norms:
        raise PathError(
            f"{type(module).__name__} has no BatchNorm with running statistics",
            "Without BatchNorm there is nothing to reset; `repair` rescales linear and convolution layers.",
        )
    function = NetworkFunction(module)
    moments = {name: _Moments() for name in norms}

    def hear(name: str, _norm: nn.Module, given: Any, _answer: Any) -> None:
        moments[name].add(given[0], 1)

    with torch.no_grad(), _hooked(norms, hear):
        for number, batch in enumerate(batches, start=1):
            try:
                function.outputs(parameters, batch, batch_statistics=True)
            except ValueError as error:  # torch's own, of a single value a channel
                raise PathError(
                    f"BatchNorm cannot normalise by batch {number}: {error}",
                    "Give batches of two examples or more.",
                ) from error
    result = dict(parameters)
    for name in norms:
        mean, variance = moments[name].measured(name, correction=1)
        for kind, value in (("running_mean", mean), ("running_var", variance)):
            old = result[f"{name}.{kind}"]
            result[f"{name}.{kind}"] = value.to(old)
    return result


def repair(
    module: nn.Module,
    a: Parameters,
    b: Parameters,
    mixed: Parameters,
    t: float,
    batches: Sequence[Batch],
    *,
    layers: Sequence[str] | None = None,
) -> dict[str, Tensor]:
    """A network between two others with activations as large as theirs.

    Between networks a and b the variance of activations collapses. In every channel the mean is set to
    (1−t)μ_a + tμ_b and the standard deviation to (1−t)σ_a + tσ_b, before the nonlinearity.

    With BatchNorm, whose gains and offsets are mixed already, this is `reset_statistics`. Without it the factors
    and offsets are folded into weights and biases of linear and convolution layers, one after another in the
    order in which they run, each measured behind those already repaired. Padding counts as all else does.

    Args:
        module: The network; it is not changed.
        a: The tensors at t = 0, by the names of its `state_dict`.
        b: Those at t = 1.
        mixed: Those at t, to be repaired.
        t: Between 0 and 1.
        batches: Data, gone through once for every layer and network; labels are not used.
        layers: Which layers; all linear and convolution layers but the last to run, the output, if
            None.

    Raises:
        PathError: t outside [0, 1], no data, no such layer, a layer without bias, which cannot take the
            offset, or statistics that are not finite.
    """
    if not 0 <= t <= 1:
        raise PathError(f"t = {t} is not between the networks", "Give t from 0 to 1.")
    if has_batch_norm(module):
        return reset_statistics(module, mixed, batches)
    if not batches:
        raise PathError("There is no data to measure activations on", "Give a batch at least.")
    function = NetworkFunction(module)
    chosen = _chosen(module, function, mixed, batches[0], layers)
    result = dict(mixed)
    goals = [_measured(module, function, point, chosen, batches) for point in (a, b)]
    for name in chosen:
        mean, deviation = (
            (1 - t) * one + t * other
            for one, other in zip(goals[0][name], goals[1][name], strict=True)
        )
        now = _measured(module, function, result, [name], batches)[name]
        spread = now.deviation > _ROUNDING * (now.mean.abs() + deviation)
        scale = torch.where(spread, deviation / now.deviation, 1.0)
        weight, bias = wide(result[f"{name}.weight"]), wide(result[f"{name}.bias"])
        factors = scale.reshape(-1, *(1 for _ in weight.shape[1:]))
        result[f"{name}.weight"] = (weight.double() * factors).to(weight.dtype)
        moved = (bias.double() - now.mean) * scale + mean
        result[f"{name}.bias"] = moved.to(bias.dtype)
    return result


class _Channels(NamedTuple):
    """Statistics of a layer, each of shape [channels], float64."""

    mean: Tensor
    deviation: Tensor


class _Moments:
    """Mean and variance over everything heard, pooled batch by batch (Chan, Golub and LeVeque 1983)."""

    def __init__(self) -> None:
        self._count = 0
        self._mean: Tensor | None = None
        self._square: Tensor | None = None

    def add(self, x: Tensor, channel: int) -> None:
        """Activations with their channels in that dimension."""
        rows = x.detach().double().movedim(channel, -1).flatten(0, -2)
        count, mean = len(rows), rows.mean(0)
        square = (rows - mean).square().sum(0)
        if self._mean is None or self._square is None:
            self._count, self._mean, self._square = count, mean, square
            return
        total = self._count + count
        apart = mean - self._mean
        self._mean = self._mean + apart * (count / total)
        self._square = self._square + square + apart.square() * (self._count * count / total)
        self._count = total

    def measured(self, name: str, correction: int) -> tuple[Tensor, Tensor]:
        """Mean and variance, each of shape [channels]."""
        if self._mean is None or self._square is None:
            raise PathError(
                f"Nothing passed through {name!r}", "Give a batch at least, through which it runs."
            )
        if self._count <= correction:
            raise PathError(
                f"{name!r} has a single value a channel, which has no variance", "Give more data."
            )
        if not (self._mean.isfinite().all() and self._square.isfinite().all()):
            raise PathError(
                f"What passes through {name!r} is not finite",
                "See that the models and the data are, and run the network in float32.",
            )
        return self._mean, self._square / (self._count - correction)


def _measured(
    module: nn.Module,
    function: NetworkFunction,
    parameters: Parameters,
    names: Sequence[str],
    batches: Iterable[Batch],
) -> dict[str, _Channels]:
    """Statistics of the outputs of some layers."""
    layers = {name: module.get_submodule(name) for name in names}
    moments = {name: _Moments() for name in names}

    def hear(name: str, layer: nn.Module, _given: Any, answer: Tensor) -> None:
        moments[name].add(answer, -1 if isinstance(layer, nn.Linear) else 1)

    with torch.no_grad(), _hooked(layers, hear):
        for batch in batches:
            function.outputs(parameters, batch)
    found = {}
    for name in names:
        mean, variance = moments[name].measured(name, correction=0)
        found[name] = _Channels(mean, variance.sqrt())
    return found


def _chosen(
    module: nn.Module,
    function: NetworkFunction,
    parameters: Parameters,
    batch: Batch,
    layers: Sequence[str] | None,
) -> list[str]:
    """The layers to repair, in the order in which they run."""
    every = {name: each for name, each in module.named_modules() if isinstance(each, _LAYERS)}
    if layers is not None and (unknown := sorted(set(layers) - every.keys())):
        raise PathError(
            f"{type(module).__name__} has no linear or convolution layer {unknown[0]!r}",
            f"It has: {', '.join(every)}.",
        )
    order: dict[str, None] = {}

    def hear(name: str, _layer: nn.Module, _given: Any, _answer: Any) -> None:
        order.pop(name, None)
        order[name] = None

    with torch.no_grad(), _hooked(every, hear):
        function.outputs(parameters, batch)
    run = list(order)
    chosen = run[:-1] if layers is None else [name for name in run if name in layers]
    if not chosen:
        raise PathError(
            f"{type(module).__name__} has no layer to repair",
            "It needs a linear or convolution layer before its output.",
        )
    for name in chosen:
        if every[name].bias is None:
            raise PathError(
                f"{name!r} has no bias, which would take the new mean",
                "Leave it out in layers=, or give the network biases of 0.",
            )
    return chosen


def _norms(module: nn.Module) -> dict[str, nn.Module]:
    return {
        name: each
        for name, each in module.named_modules()
        if isinstance(each, _Norm) and each.running_mean is not None
    }


@contextmanager
def _hooked(
    modules: Mapping[str, nn.Module], hear: Callable[[str, nn.Module, Any, Any], None]
) -> Iterator[None]:
    """Tell `hear` a module's name, the module, its inputs and its output whenever it has run."""
    with ExitStack() as hooks:
        for name, each in modules.items():

            def hook(layer: nn.Module, given: Any, answer: Any, name: str = name) -> None:
                hear(name, layer, given, answer)

            hooks.callback(each.register_forward_hook(hook).remove)
        yield
