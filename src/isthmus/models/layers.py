"""The linear layers of a network, and the tensors of a checkpoint that they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from isthmus.checkpoints import Checkpoint
from isthmus.models.blocks import find_blocks
from isthmus.models.network import Weights, empty_network


@dataclass(frozen=True, slots=True)
class Layer:
    """One linear layer y = Wx + b.

    Attributes:
        weight: The tensor of W in the checkpoint.
        bias: The tensor of b; None if there is none, or another layer has it too.
        transposed: Whether the tensor is Wᵀ, as in GPT-2.
    """

    weight: str
    bias: str | None
    transposed: bool


def linear_layers(checkpoint: Checkpoint) -> list[Layer]:
    """The layers whose weight is theirs alone: no head that is tied to an embedding, for one.

    Nothing is run, so there may be layers among them that no input reaches.

    Returns:
        In the order in which calibration gives them: those in the blocks, block after block, then those
        outside. Inside these, in the order in which the network defines them.

    Raises:
        CalibrationError: if the network cannot be built or has no blocks, or a layer's tensor is missing.
        CheckpointError: if the model cannot be read.
    """
    network = empty_network(checkpoint)
    blocks = find_blocks(network).names
    found = named_layers(network, Weights(network, checkpoint))
    prefixes = tuple(f"{block}." for block in blocks)
    outside = [layer for name, layer in found.items() if not f"{name}.".startswith(prefixes)]
    inside = [
        layer
        for prefix in prefixes
        for name, layer in found.items()
        if f"{name}.".startswith(prefix)
    ]
    return [*inside, *outside]


def named_layers(network: nn.Module, weights: Weights) -> dict[str, Layer]:
    """The same, by the module's name, in the order in which the network defines them.

    Args:
        network: As `empty_network` gives it.
        weights: Its own.

    Raises:
        CalibrationError: if a layer's tensor is missing.
    """
    modules = dict(linear_modules(network))
    uses = Counter(
        weights.stored.get(name) for name, _ in network.named_parameters(remove_duplicate=False)
    )
    biases = Counter(
        weights.stored.get(f"{name}.bias") for name, module in modules.items() if _has_bias(module)
    )
    found = {}
    for name, module in modules.items():
        weight = weights.source(f"{name}.weight")
        if uses[weight] > 1:
            continue
        bias = weights.source(f"{name}.bias") if _has_bias(module) else None
        alone = bias if biases[bias] == 1 else None
        found[name] = Layer(weight, alone, transposed=not isinstance(module, nn.Linear))
    return found


def linear_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """`nn.Linear`, and `Conv1D` of GPT-2, by their names in `module`."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D":
            yield name, part


def _has_bias(module: nn.Module) -> bool:
    return module._parameters.get("bias") is not None
