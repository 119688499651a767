"""Weights of linear layers as matrices, and experts' as task vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from isthmus.checkpoints import Checkpoint
from isthmus.errors import NonFiniteError
from isthmus.models.layers import Layer


def base_and_task_vectors(
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    layer: Layer,
    weights: Sequence[str],
    biases: Sequence[str] | None,
) -> tuple[Tensor, Tensor]:
    """The base's weight and the experts' difference from it, the bias as a last column; float64.

    Args:
        base: The base model.
        experts: The others.
        layer: Its tensors in the base.
        weights: What each expert calls the weight.
        biases: And the bias; None leaves the bias out.

    Returns:
        W_0, shape [m, n] or [m, n + 1], and τ, shape [K, m, n] or [K, m, n + 1].

    Raises:
        NonFiniteError: if a model holds NaN or infinity.
    """
    origin = _matrix(base, layer.weight, None if biases is None else layer.bias, layer)
    tau = torch.empty(len(experts), *origin.shape, dtype=torch.float64)
    for k, expert in enumerate(experts):
        bias = None if biases is None else biases[k]
        tau[k] = _matrix(expert, weights[k], bias, layer) - origin
    return origin, tau


def _matrix(model: Checkpoint, weight: str, bias: str | None, layer: Layer) -> Tensor:
    values = _read(model, weight)
    matrix = values.mT if layer.transposed else values
    if bias is None:
        return matrix
    return torch.cat([matrix, _read(model, bias).unsqueeze(1)], dim=1)


def _read(model: Checkpoint, name: str) -> Tensor:
    info = model.tensors[name]
    values = np.empty(info.numel, np.float64)
    model.read(name, 0, values)
    if not np.isfinite(values).all():
        raise NonFiniteError(
            f"{model.label}: tensor {name} holds NaN or infinity",
            "A merge would spread it over the model. Leave this model out, or repair it.",
        )
    return torch.from_numpy(values).view(info.shape)
