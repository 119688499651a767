"""How many parameters the networks of the experiments have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from isthmus.lab.data.named import Data
from isthmus.lab.noise.networks import made_network
from isthmus.lab.noise.settings import NetworkSettings

MINILM = 22_700_000
"""Of all-MiniLM-L6-v2, to three digits, its embeddings included."""

_SIDES: Mapping[str, int] = {"mnist": 28, "fashion-mnist": 28, "digits": 8}
_CLASSES = 10


def parameters(settings: Mapping[str, Any]) -> int | None:
    """Of the network of a run, made once without its data; None for data whose shape is not known here.

    Args:
        settings: Of the run, as the results have them.
    """
    given = NetworkSettings(
        **{name: settings[name] for name in NetworkSettings.model_fields if name in settings}
    )
    if given.architecture == "decoder":
        shape: tuple[int, ...] = (given.context,)
    elif given.data in _SIDES:
        side = _SIDES[given.data] // given.pool
        shape = (1, side, side)
    else:
        return None
    # Networks look at nothing but the shape of their data.
    example, label = torch.zeros(1, *shape), torch.zeros(1, dtype=torch.int64)
    network = made_network(given, Data(example, label, example, label, _CLASSES))
    return sum(each.numel() for each in network.parameters())
