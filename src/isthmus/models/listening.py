"""Hearing what enters the linear layers of a network while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn

from isthmus.errors import CalibrationError, MethodError
from isthmus.projection.statistics import InputMoments, with_constant

Batch: TypeAlias = Mapping[str, Tensor]
"""What a network's forward takes, by name; `attention_mask` of shape [B, T] is 0 at padding."""


class Enough(Exception):  # noqa: N818
    """Leaves a forward pass that has given what was wanted."""


@contextmanager
def listening(
    layers: Mapping[str, nn.Module], hear: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Tell `hear` a layer's name and its input x, shape [..., n], whenever one is called."""
    with ExitStack() as hooks:
        for name, layer in layers.items():

            def hook(
                _module: nn.Module, given: Any, named: Mapping[str, Any], name: str = name
            ) -> None:
                hear(name, given[0] if given else next(iter(named.values())))

            handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def real_inputs(weight: str, x: Tensor, batch: Batch) -> Tensor:
    """The inputs that stand for no padding, each with a last entry 1, shape [..., n + 1].

    Args:
        weight: Whose inputs they are, for errors.
        x: All inputs, shape [..., n].
        batch: What the network was run on.

    Raises:
        CalibrationError: if there is padding, and the shape does not tell where.
    """
    return with_constant(_real(weight, x, batch))


def add_inputs(moments: InputMoments, weight: str, inputs: Tensor) -> None:
    """Add what `real_inputs` gives.

    Raises:
        CalibrationError: if it is NaN, infinite or of another size.
    """
    try:
        moments.add(inputs)
    except MethodError as error:
        raise CalibrationError(
            f"{weight}: {error.problem}",
            "Activations overflow, or weights are not finite; leave out the model or these examples.",
        ) from error


def _real(weight: str, x: Tensor, batch: Batch) -> Tensor:
    mask = batch.get("attention_mask")
    if mask is None or bool(mask.all()):
        return x
    leading = x.shape[:-1]
    if leading == mask.shape or leading == (mask.numel(),):
        return x.reshape(-1, x.shape[-1])[mask.reshape(-1).bool()]
    if leading == (len(mask),):  # one vector an example, as a pooler takes
        return x
    raise CalibrationError(
        f"{weight}: inputs of shape {list(x.shape)} do not show which are padding, where the "
        f"attention mask has shape {list(mask.shape)}",
        "Give examples of equal length, such as long texts that tokens cuts.",
    )
