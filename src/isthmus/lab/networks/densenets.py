"""Densely connected networks of convolutions: every layer sees all before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_BLOCKS = 3


class DenseNet(nn.Module):
    """Three dense blocks (Huang et al. 2017, arXiv 1608.06993) for pictures of one channel.

    Between blocks, a 1 x 1 convolution halves the channels and pooling halves the sides.

    Args:
        growth: Channels that each layer adds; the stem makes twice as many.
        layers: Of each block.
        classes: Outputs.
    """

    def __init__(self, growth: int, layers: int, classes: int = 10) -> None:
        super().__init__()
        width = 2 * growth
        self.stem = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.blocks = nn.ModuleList()
        self.between = nn.ModuleList()
        for number in range(_BLOCKS):
            if number:
                self.between.append(_layer(width, width // 2, kernel=1))
                width //= 2
            block = nn.ModuleList(
                _layer(width + place * growth, growth, kernel=3) for place in range(layers)
            )
            self.blocks.append(block)
            width += layers * growth
        self.last_norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, classes] of pictures [N, 1, H, W]."""
        seen = self.stem(x)
        for number, block in enumerate(self.blocks):
            if number:
                seen = nn.functional.avg_pool2d(self.between[number - 1](seen), 2)
            for layer in block:  # type: ignore[attr-defined]
                seen = torch.cat([seen, layer(seen)], dim=1)
        logits: Tensor = self.head(self.last_norm(seen).relu().mean(dim=(2, 3)))
        return logits


def _layer(into: int, out: int, kernel: int) -> nn.Sequential:
    convolution = nn.Conv2d(into, out, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(nn.BatchNorm2d(into), nn.ReLU(), convolution)
