"""One pair: trained, merged, judged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path as Folder
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.lab.data.named import Data
from isthmus.lab.networks.state import seeded, state
from isthmus.lab.noise.data import noise_data
from isthmus.lab.noise.networks import head_of, made_network, scale_invariant, symmetries
from isthmus.lab.noise.settings import PairSettings
from isthmus.lab.noise.training import train
from isthmus.lab.paths.training import whole
from isthmus.models.batch_norm import has_batch_norm, reset_statistics
from isthmus.models.functional import NetworkFunction
from isthmus.optim.noise_scale import effective_noise_scale
from isthmus.paths.barriers import barrier
from isthmus.paths.curves import Linear
from isthmus.paths.distance import relative_distance
from isthmus.paths.feature_similarity import linear_cka
from isthmus.paths.mixing import Parameters
from isthmus.paths.path import Path, grid
from isthmus.paths.profile import profile
from isthmus.symmetry.matching import match_weights

POINTS = 5
"""Of the grid on which barriers are measured; its middle is the merged model."""

_BATCH = 1000
_RESET = 2000
"""Training examples from which BatchNorm's statistics are measured for a merged model."""


def run_pair(
    settings: PairSettings, folder: Folder, tell: Callable[[float], None], *, cache: Folder
) -> Mapping[str, Any]:
    """Train two networks that differ in the order of their data, and merge them by their mean.

    Args:
        settings: Of both.
        folder: For checkpoints.
        tell: Told the share that is done.
        cache: Where data lie.

    Returns:
        ``noise_scale``; ``accuracy``, ``loss`` and ``training_loss`` of the parents (their means), ``best`` (the
        accuracy of the better one) and ``merged_...``; the merging gains ``gain`` (accuracy over the parents'
        mean), ``gain_over_best`` and ``loss_gain``; ``barrier`` and ``training_barrier`` of the loss along the
        line, kind (b); ``distance`` of the parents relative to the norm of one; ``cka`` of the features that
        their heads read; ``effective_noise_scale``, η/(B(1 − μ)‖w‖²) as measured, where weights are scale-invariant; ``rebasin_...`` after
        matching, where asked for; ``curves`` of the training losses, by epoch.

    Raises:
        Diverged: One of the trainings did.
        IsthmusError: Data are missing.
    """
    data = noise_data(settings, cache)
    seeded(settings.seed)
    network = made_network(settings, data)
    curves: dict[str, list[float]] = {}
    total = 2 * settings.epochs - settings.shared

    def trained(number: int, name: str, epochs: tuple[int, int], done: int) -> dict[str, Tensor]:
        count = epochs[1] - epochs[0]
        curves[name] = train(
            network,
            data,
            settings,
            epochs=epochs,
            order=(settings.seed, number),
            checkpoint=folder / f"{name}.pt",
            tell=lambda share: tell((done + share * count) / total),
        )
        return state(network)

    trunk = trained(0, "trunk", (0, settings.shared), 0)
    a = trained(1, "a", (settings.shared, settings.epochs), settings.shared)
    network.load_state_dict(trunk)
    b = trained(2, "b", (settings.shared, settings.epochs), settings.epochs)
    found = _judged(settings, data, network, a, b)
    for name in curves:
        (folder / f"{name}.pt").unlink(missing_ok=True)
    return {"noise_scale": settings.noise_scale, **found, "curves": curves}


def _judged(
    settings: PairSettings, data: Data, network: nn.Module, a: Parameters, b: Parameters
) -> dict[str, float]:
    function = NetworkFunction(network)
    reset = whole((data.inputs[:_RESET], data.targets[:_RESET]), _BATCH)
    sets = {
        "": whole((data.test_inputs, data.test_targets), _BATCH),
        "training_": reset,
    }
    normalised = has_batch_norm(network)

    def evaluate(parameters: Parameters) -> dict[str, float]:
        return {
            part + figure: value
            for part, batches in sets.items()
            for figure, value in function.evaluate(parameters, batches).items()
        }

    def prepared(_t: float, parameters: Parameters) -> Parameters:
        # The ends too: statistics that ran along with a noisy training are not its weights' own.
        return reset_statistics(network, parameters, reset) if normalised else parameters

    def walked(other: Parameters) -> tuple[Mapping[str, tuple[float, ...]], float, float]:
        walk = profile(Path(Linear(), (a, other)), evaluate, grid(POINTS), prepare=prepared)
        on_test, on_training = (barrier(walk.values[f"{part}loss"], walk.ts) for part in sets)
        return walk.values, on_test.value, on_training.value

    values, on_test, on_training = walked(b)
    middle, ends = POINTS // 2, (0, -1)
    parents = {name: sum(series[end] for end in ends) / 2 for name, series in values.items()}
    merged = {f"merged_{name}": series[middle] for name, series in values.items()}
    best = max(values["accuracy"][end] for end in ends)
    found = {
        **parents,
        "best": best,
        **merged,
        "gain": merged["merged_accuracy"] - parents["accuracy"],
        "gain_over_best": merged["merged_accuracy"] - best,
        "loss_gain": parents["loss"] - merged["merged_loss"],
        "barrier": on_test,
        "training_barrier": on_training,
        "distance": relative_distance(*(_learned(function, each) for each in (a, b))),
        "cka": linear_cka(
            *(_features(network, function, each, data.test_inputs[:_BATCH]) for each in (a, b))
        ),
    }
    if scales := [
        effective_noise_scale(
            settings.lr,
            settings.batch,
            settings.momentum,
            scale_invariant=True,
            squared_norm=float(a[name].square().sum()),
        )
        for name in scale_invariant(network)
    ]:
        found["effective_noise_scale"] = fmean(scales)
    if settings.rebasin:
        spec = symmetries(network, settings)
        matching = match_weights(
            spec, *({name: each[name] for name in spec.tensors} for each in (a, b))
        )
        moved = {**b, **spec.act(matching.element, {name: b[name] for name in spec.tensors})}
        _, found["rebasin_barrier"], found["rebasin_training_barrier"] = walked(moved)
        found["rebasin_distance"] = relative_distance(
            *(_learned(function, each) for each in (a, moved))
        )
    return found


def _learned(function: NetworkFunction, parameters: Parameters) -> dict[str, Tensor]:
    return {name: parameters[name] for name in function.trainable}


def _features(
    network: nn.Module, function: NetworkFunction, parameters: Parameters, inputs: Tensor
) -> Tensor:
    """What the head reads, shape [examples or tokens, units]."""
    heard: list[Tensor] = []
    hook = head_of(network).register_forward_pre_hook(lambda _module, given: heard.append(given[0]))
    with torch.no_grad():
        function.outputs(parameters, (inputs, inputs))
    hook.remove()
    return heard[0].flatten(0, -2)
