"""Residual networks of convolutions and their symmetries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

from torch import Tensor, nn

from isthmus.symmetry.group import Group
from isthmus.symmetry.monomial import Monomial
from isthmus.symmetry.spec import FREE, Dimension, Site, Spec, on

Normalisation = Literal["batch", "layer"]


class ResNet(nn.Module):
    """Stages of residual blocks of two 3 x 3 convolutions, pictures of one channel.

    The stream is halved in size and doubled in width between stages by a strided 1 x 1 convolution.
    Four stages of two blocks are as deep as a ResNet-18.

    Args:
        width: Channels of the first stage.
        blocks: Of each stage.
        normalisation: ``batch`` or ``layer`` (one group of all channels and places).
        classes: Outputs.
        stages: How many.
    """

    def __init__(
        self,
        width: int,
        blocks: int,
        normalisation: Normalisation,
        classes: int = 10,
        stages: int = 3,
    ) -> None:
        super().__init__()
        widths = [width * 2**stage for stage in range(stages)]
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.stem_norm = _norm(normalisation, width)
        self.stages = nn.ModuleList(
            nn.ModuleList(_Block(size, normalisation) for _ in range(blocks)) for size in widths
        )
        self.between = nn.ModuleList(
            nn.Conv2d(one, other, 1, stride=2, bias=False) for one, other in pairwise(widths)
        )
        self.last_norm = _norm(normalisation, widths[-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, classes] of pictures [N, 1, H, W]."""
        stream = self.stem_norm(self.stem(x)).relu()
        for number, stage in enumerate(self.stages):
            if number:
                stream = self.between[number - 1](stream)
            for block in stage:  # type: ignore[attr-defined]
                stream = block(stream)
        logits: Tensor = self.head(self.last_norm(stream).relu().mean(dim=(2, 3)))
        return logits


class _Block(nn.Module):
    def __init__(self, width: int, normalisation: Normalisation) -> None:
        super().__init__()
        self.norm1 = _norm(normalisation, width)
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = _norm(normalisation, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(self.norm1(x).relu())
        moved: Tensor = self.conv2(self.norm2(inner).relu())
        return x + moved


def _norm(kind: Normalisation, width: int) -> nn.Module:
    return nn.BatchNorm2d(width) if kind == "batch" else nn.GroupNorm(1, width)


def resnet_spec(network: ResNet) -> Spec:
    """Permutations of the channels of every stage's stream and of every block's inside."""
    axes: dict[str, Group[Any]] = {}
    tensors: dict[str, Sequence[Dimension]] = {}
    shapes = network.state_dict()

    def norm(name: str, axis: str) -> None:
        for kind, role in (
            ("weight", "gain"),
            ("bias", "vector"),
            ("running_mean", "vector"),
            ("running_var", "gain"),
        ):
            if f"{name}.{kind}" in shapes:
                tensors[f"{name}.{kind}"] = (on(axis, role),)
        if f"{name}.num_batches_tracked" in shapes:
            tensors[f"{name}.num_batches_tracked"] = ()

    def convolution(name: str, into: Dimension, out: Dimension) -> None:
        tensors[f"{name}.weight"] = (out, into, FREE, FREE)

    convolution("stem", FREE, on("stream.0"))
    norm("stem_norm", "stream.0")
    for number, stage in enumerate(network.stages):
        stream = f"stream.{number}"
        if number:
            convolution(f"between.{number - 1}", on(f"stream.{number - 1}", "dual"), on(stream))
        for place in range(len(stage)):  # type: ignore[arg-type]
            at, inside = f"stages.{number}.{place}", f"inside.{number}.{place}"
            width = len(shapes[f"{at}.conv1.weight"])
            axes[stream] = Monomial(width)
            axes[inside] = Monomial(width)
            norm(f"{at}.norm1", stream)
            convolution(f"{at}.conv1", on(stream, "dual"), on(inside))
            norm(f"{at}.norm2", inside)
            convolution(f"{at}.conv2", on(inside, "dual"), on(stream))
    norm("last_norm", stream)
    tensors["head.weight"] = (FREE, on(stream, "dual"))
    tensors["head.bias"] = (FREE,)
    sites = {
        f"stream.{number}": [
            Site(f"stages.{number}.{place}", dimension=1)
            for place in range(len(stage))  # type: ignore[arg-type]
        ]
        for number, stage in enumerate(network.stages)
    }
    sites |= {
        axis: [Site(axis.replace("inside", "stages") + ".norm2", dimension=1)]
        for axis in axes
        if axis.startswith("inside")
    }
    return Spec(axes, tensors, sites)


def learned(spec: Spec) -> Spec:
    """The same without running statistics, whose size says nothing about how alike networks are."""
    tensors = {
        name: dimensions
        for name, dimensions in spec.tensors.items()
        if not name.endswith((".running_mean", ".running_var", ".num_batches_tracked"))
    }
    return Spec(spec.axes, tensors, spec.sites)
