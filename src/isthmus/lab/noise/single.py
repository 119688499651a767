"""One training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from isthmus.lab.networks.state import seeded, state
from isthmus.lab.noise.data import noise_data
from isthmus.lab.noise.networks import made_network
from isthmus.lab.noise.settings import SingleSettings
from isthmus.lab.noise.training import train
from isthmus.lab.paths.training import whole
from isthmus.models.functional import NetworkFunction

_BATCH = 1000


def run_single(
    settings: SingleSettings, folder: Path, tell: Callable[[float], None], *, cache: Path
) -> Mapping[str, Any]:
    """Train a network; its weights stay in the run's folder, as ``model.safetensors``.

    Args:
        settings: Of the training.
        folder: For the weights and checkpoints.
        tell: Told the share that is done.
        cache: Where data lie.

    Returns:
        ``noise_scale``, ``accuracy``, ``loss``, ``training_accuracy``, ``training_loss``, and ``curve``, the mean
        training loss of every epoch.

    Raises:
        Diverged: The training did.
        IsthmusError: Data are missing.
    """
    data = noise_data(settings, cache)
    seeded(settings.seed)
    network = made_network(settings, data)
    curve = train(
        network,
        data,
        settings,
        epochs=(0, settings.epochs),
        order=(settings.seed, 0),
        checkpoint=folder / "checkpoint.pt",
        tell=tell,
    )
    weights = state(network)
    function = NetworkFunction(network)
    figures = {
        part + name: value
        for part, batches in (
            ("", whole((data.test_inputs, data.test_targets), _BATCH)),
            ("training_", whole((data.inputs, data.targets), _BATCH)),
        )
        for name, value in function.evaluate(weights, batches).items()
    }
    save_file(weights, folder / "model.safetensors")
    return {"noise_scale": settings.noise_scale, **figures, "curve": curve}
