"""Whether two sets of parameters give a network the same function."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from isthmus.errors import SymmetryError
from isthmus.symmetry.spec import Element, Spec

Parameters: TypeAlias = Mapping[str, Tensor]
Inputs: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]
"""What a network's forward takes: one argument, several, or several by name."""

_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 5e-2,
    torch.bfloat16: 2e-1,
}
"""Relative to the outputs; roundings of weights grow with depth, wrong axes give about 1."""


@dataclass(frozen=True)
class Equivalence:
    """How far two functions are apart on some inputs.

    Attributes:
        error: ‖f(x; b) − f(x; a)‖ / ‖f(x; a)‖; infinite if an output is not finite.
        tolerance: The error that was allowed.
        dtype: In which the network ran.
        axes: The error of every axis alone; empty unless something failed and the axes are known.
    """

    error: float
    tolerance: float
    dtype: torch.dtype
    axes: Mapping[str, float]

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance


def check_equivalence(
    network: nn.Module,
    a: Parameters,
    b: Parameters,
    inputs: Inputs,
    *,
    tolerance: float | None = None,
    dtype: torch.dtype | None = None,
    spec: Spec | None = None,
    element: Element | None = None,
) -> Equivalence:
    """Run a network with the parameters a and then b.

    Args:
        network: In evaluation mode. Its own numbers are not used, so that parameters may be on the meta
            device; tied ones may be left out.
        a: Parameters by the network's names, and buffers that are in checkpoints.
        b: The same for the function in question.
        inputs: A tensor, positional arguments or arguments by name.
        tolerance: The largest relative error allowed; the dtype's own if None: 1e-9 in float64, 1e-3 in
            float32, 0.05 in float16, 0.2 in bfloat16.
        dtype: To run in; the parameters' own if None. float64 is kept throughout, also where a network
            asks for float32.
        spec: With `element`, tells which axis is at fault.
        element: What made b of a.

    Raises:
        SymmetryError: if the error is larger, naming the axes that fail alone.
    """
    dtype = dtype or _dtype_of(a)
    allowed = _TOLERANCE.get(dtype, 1e-3) if tolerance is None else tolerance
    wanted = outputs_of(network, a, inputs, dtype)
    result = Equivalence(
        relative_error(wanted, outputs_of(network, b, inputs, dtype)), allowed, dtype, {}
    )
    if result.passed:
        return result
    if spec is None or element is None:
        raise SymmetryError(
            f"The network's function changed: its outputs differ by {result.error:.2g}, where "
            f"{allowed:.2g} is allowed",
            "Give the spec and the element to learn which axis is at fault.",
        )
    alone = _errors_by_axis(network, spec, element, a, inputs)
    at_fault = {axis: error for axis, error in alone.items() if not error <= _AT_FAULT}
    if at_fault:
        named = ", ".join(f"{axis!r} ({error:.2g})" for axis, error in list(at_fault.items())[:5])
        group = spec.axes[next(iter(at_fault))]
        problem = (
            f"The network's function changed, by {result.error:.2g}: on {len(at_fault)} axes the group "
            f"is no symmetry: {named}"
        )
        cure = f"See where the spec puts the first one, on which {group!r} acts, or leave it out."
    else:
        problem = (
            f"The network's function changed by {result.error:.2g} in {str(dtype)[6:]}, where "
            f"{allowed:.2g} is allowed, though every axis alone keeps it in float64"
        )
        cure = "These are roundings: keep the tensors in a wider dtype, or allow more."
    raise SymmetryError(problem, cure)


def check_action(
    network: nn.Module,
    spec: Spec,
    element: Element,
    parameters: Parameters,
    inputs: Inputs,
    *,
    tolerance: float | None = None,
) -> Equivalence:
    """Compare parameters with their image under an element, all in float64.

    Args:
        network: As for `check_equivalence`.
        spec: Where the element acts.
        element: In question.
        parameters: By the network's names.
        inputs: As for `check_equivalence`.
        tolerance: 1e-9 if None.

    Raises:
        SymmetryError: if the function changes, naming the axes that fail alone.
    """
    wide = {name: _wide(tensor) for name, tensor in parameters.items()}
    return check_equivalence(
        network,
        wide,
        spec.act(element, wide),
        inputs,
        tolerance=tolerance,
        dtype=torch.float64,
        spec=spec,
        element=element,
    )


def random_inputs(
    config: Mapping[str, Any], *, batch: int = 2, length: int = 16, seed: int = 0
) -> dict[str, Tensor]:
    """Token ids, or images in float64, as a configuration of Transformers asks for.

    Args:
        config: As in `config.json`.
        batch: How many examples.
        length: Tokens of each, fewer where positions are.
        seed: For the draw.

    Raises:
        SymmetryError: if it says neither how many tokens nor how large images are.
    """
    generator = torch.Generator().manual_seed(seed)
    if config.get("vocab_size"):
        # RoBERTa counts positions from its padding token on.
        places = config.get("max_position_embeddings") or config.get("n_positions") or length + 8
        shape = (batch, max(1, min(length, places - 8)))
        return {"input_ids": torch.randint(config["vocab_size"], shape, generator=generator)}
    if config.get("image_size"):
        size = config["image_size"]
        sides = (size, size) if isinstance(size, int) else tuple(size)
        images = (batch, config.get("num_channels", 3), *sides)
        return {"pixel_values": torch.randn(images, generator=generator, dtype=torch.float64)}
    raise SymmetryError(
        f"A configuration of type {config.get('model_type')!r} says neither how many tokens there are "
        "nor how large images are",
        "Give inputs of your own.",
    )


def outputs_of(
    network: nn.Module, parameters: Parameters, inputs: Inputs, dtype: torch.dtype
) -> list[Tensor]:
    """The floating-point outputs of a network, in float64, without what it shows of its inside.

    Args:
        network: As for `check_equivalence`.
        parameters: By the network's names.
        inputs: As for `check_equivalence`.
        dtype: To run in.

    Raises:
        SymmetryError: if a parameter is missing, or a name is not the network's.
    """
    _check_names(network, parameters)

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    numbers = {name: cast(tensor) for name, tensor in parameters.items()}
    for name, buffer in network.named_buffers():
        numbers.setdefault(name, cast(buffer) if dtype is torch.float64 else buffer)
    args: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        named = {key: cast(x) for key, x in inputs.items()}
    elif isinstance(inputs, Tensor):
        args = (cast(inputs),)
    else:
        args = tuple(cast(x) for x in inputs)
    with torch.no_grad(), _Float64() if dtype is torch.float64 else nullcontext():
        result = functional_call(network, numbers, args, named)
    return [x.double() for x in _tensors(result) if x.is_floating_point()]


class _Float64(TorchFunctionMode):
    """Casts to float32, which norms and attention ask for, give float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()

        def wide(x: Any) -> Any:
            return torch.float64 if x is torch.float32 else x

        named = {key: wide(x) for key, x in (kwargs or {}).items()}
        return func(*(wide(x) for x in args), **named)


_INSIDE = ("hidden_states", "attentions", "past_key_values", "cache")
"""Outputs of Transformers that show coordinates, which may change."""

_AT_FAULT = 1e-6
"""An axis that changes the function more than this in float64 is none of its symmetries."""


def _errors_by_axis(
    network: nn.Module, spec: Spec, element: Element, parameters: Parameters, inputs: Inputs
) -> dict[str, float]:
    wide = {name: _wide(tensor) for name, tensor in parameters.items()}
    wanted = outputs_of(network, wide, inputs, torch.float64)
    return {
        axis: relative_error(
            wanted,
            outputs_of(network, spec.act({axis: part}, wide), inputs, torch.float64),
        )
        for axis, part in element.items()
    }


def relative_error(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """‖found − wanted‖ / ‖wanted‖ over all outputs; infinite if it is not finite.

    Args:
        wanted: As `outputs_of` gives them.
        found: As many, of the same shapes.
    """
    size = math.sqrt(sum(float(x.square().sum()) for x in wanted))
    apart = math.sqrt(
        sum(float((x - y).square().sum()) for x, y in zip(wanted, found, strict=True))
    )
    error = apart / size if size else apart
    return error if math.isfinite(error) else math.inf


def _check_names(network: nn.Module, parameters: Parameters) -> None:
    # torch.func leaves out names that it does not find, and then anything passes.
    own = dict(network.named_parameters(remove_duplicate=False))
    buffers = {name for name, _ in network.named_buffers(remove_duplicate=False)}
    unknown = parameters.keys() - own.keys() - buffers
    given = {id(own[name]) for name in parameters if name in own}
    missing = [name for name, parameter in own.items() if id(parameter) not in given]
    for names, verb in ((unknown, "has no"), (missing, "misses its")):
        if names:
            raise SymmetryError(
                f"{type(network).__name__} {verb} parameter {min(names)!r}",
                "Give all parameters by the names of network.named_parameters().",
            )


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    if isinstance(result, Mapping):
        return [x for key, part in result.items() if key not in _INSIDE for x in _tensors(part)]
    if isinstance(result, (tuple, list)):
        return [x for part in result for x in _tensors(part)]
    return []


def _dtype_of(parameters: Parameters) -> torch.dtype:
    return next(x.dtype for x in parameters.values() if x.is_floating_point())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor
