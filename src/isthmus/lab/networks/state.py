"""Where a network starts, and where it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def state(network: nn.Module) -> dict[str, Tensor]:
    """A copy of a network's tensors, by name."""
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def seeded(seed: int) -> None:
    """Fix the start of the networks that are made next."""
    torch.manual_seed(seed)
