"""What torch's modules and functions let through: permutations, signs, positive factors."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

LINEAR = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
"""Keep units, signs and scales."""

AVERAGES = (
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
)
"""Linear in every channel."""

MAXIMA = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)
"""Let positive factors through."""

HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU)
"""f(cx) = c f(x) for c > 0."""

ODD = (nn.Tanh, nn.Softsign, nn.Hardtanh)
"""f(−x) = −f(x)."""

OTHERS = (
    nn.GELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.Mish,
    nn.Softplus,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.ReLU6,
)
"""Let permutations through, and nothing else."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""With channels in the second dimension."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Norms that look at one channel each."""

FUNCTIONS: dict[Any, str] = {
    torch.relu: "homogeneous",
    nn.functional.relu: "homogeneous",
    nn.functional.leaky_relu: "homogeneous",
    torch.tanh: "odd",
    nn.functional.tanh: "odd",
    nn.functional.gelu: "other",
    nn.functional.silu: "other",
    torch.sigmoid: "other",
    nn.functional.sigmoid: "other",
    nn.functional.elu: "other",
    nn.functional.dropout: "linear",
    nn.functional.avg_pool2d: "linear",
    nn.functional.adaptive_avg_pool2d: "linear",
    nn.functional.max_pool2d: "homogeneous",
    nn.functional.adaptive_max_pool2d: "homogeneous",
}
"""Which of these kinds a function is."""

METHODS = {
    "relu": "homogeneous",
    "tanh": "odd",
    "sigmoid": "other",
    "contiguous": "linear",
    "clone": "linear",
}
"""The same for methods of tensors."""

ADD = (operator.add, operator.iadd, torch.add)
"""Both summands lie on one axis."""

MULTIPLY = (operator.mul, operator.imul, torch.mul)
"""Both factors lie on one axis; neither signs nor scales pass."""
