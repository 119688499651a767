"""The networks of a training's settings, and what is special about each."""

from __future__ import annotations

from math import prod

from torch import Tensor, nn

from isthmus.errors import IsthmusError
from isthmus.lab.data.named import Data
from isthmus.lab.networks.densenets import DenseNet
from isthmus.lab.networks.mlps import mlp, mlp_spec
from isthmus.lab.networks.resnets import ResNet, learned, resnet_spec
from isthmus.lab.networks.transformers import ByteDecoder, VisionTransformer
from isthmus.lab.noise.settings import NetworkSettings
from isthmus.symmetry.spec import Spec

_PATCHES = 7
"""Patches of a side that a picture is cut into at the most."""


def made_network(settings: NetworkSettings, data: Data) -> nn.Module:
    """An untrained network for the data.

    Raises:
        IsthmusError: A network for pictures and data that are none, or the other way round.
    """
    shape = tuple(data.inputs.shape[1:])
    kind, width, depth = settings.architecture, settings.width, settings.depth
    if (kind == "decoder") is not (len(shape) == 1):
        raise IsthmusError(
            f"{settings.data} has examples of shape {list(shape)}, which a {kind} cannot read",
            "A decoder reads text; all others read pictures.",
        )
    if kind == "decoder":
        return ByteDecoder(width, depth, settings.context)
    if kind == "mlp":
        return nn.Sequential(nn.Flatten(), *mlp(prod(shape), width, depth, data.classes))
    channels, side = shape[0], shape[1]
    if channels != 1 or shape[2] != side:
        raise IsthmusError(
            f"{settings.data} has pictures of shape {list(shape)}",
            "The lab's networks of convolutions and patches take square ones of one channel; an mlp takes any.",
        )
    if kind == "resnet":
        return ResNet(width, depth, "batch", data.classes)
    if kind == "densenet":
        return DenseNet(width, depth, data.classes)
    patch = next(
        size for size in range(1, side + 1) if side % size == 0 and side // size <= _PATCHES
    )
    return VisionTransformer(side, patch, width, depth, data.classes)


def scale_invariant(network: nn.Module) -> dict[str, Tensor]:
    """Weights whose size the network ignores, because BatchNorm follows: the same function for any c·w, c > 0.

    In residual networks those are the first convolution of every block, in dense ones all convolutions. The stem of
    a residual network is such a weight too, and is left out: what was measured is the mean over the blocks.
    """
    parameters = dict(network.named_parameters())
    if isinstance(network, DenseNet):
        return {name: value for name, value in parameters.items() if value.ndim == 4}
    if isinstance(network, ResNet):
        return {name: value for name, value in parameters.items() if name.endswith("conv1.weight")}
    return {}


def symmetries(network: nn.Module, settings: NetworkSettings) -> Spec:
    """The permutations of an MLP's or a residual network's units; without running statistics.

    Raises:
        IsthmusError: Another network.
    """
    if isinstance(network, ResNet):
        return learned(resnet_spec(network))
    if settings.architecture == "mlp":
        plain = mlp_spec(settings.width, settings.depth)
        # Flattening comes first here.
        tensors = {}
        for name, dimensions in plain.tensors.items():
            layer, kind = name.split(".")
            tensors[f"{int(layer) + 1}.{kind}"] = dimensions
        return Spec(plain.axes, tensors)
    raise IsthmusError(
        f"There is no description of the symmetries of {settings.architecture} here",
        "mlp and resnet have one.",
    )


def head_of(network: nn.Module) -> nn.Module:
    """The last linear layer, which reads the features."""
    return [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
