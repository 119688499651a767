"""Diagnosis of a network before the merge, layer by layer, from stored moments."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.checkpoints import Checkpoint
from isthmus.errors import CalibrationError, MethodError
from isthmus.models.calibration import Report
from isthmus.models.layers import Layer, linear_layers
from isthmus.models.matrices import base_and_task_vectors
from isthmus.models.store import StoredMoments
from isthmus.projection.diagnosis import LayerDiagnosis, diagnose_layer
from isthmus.projection.statistics import InputMoments

SEED = 0
"""Of DARE's draws."""


@dataclass(frozen=True)
class NetworkDiagnosis:
    """What merges would leave of the error of a network's linear layers.

    Attributes:
        layers: By the weight's name in the base, in the network's order.
        left_out: Layers that are not judged, and why.
    """

    layers: Mapping[str, LayerDiagnosis]
    left_out: Mapping[str, str]


def diagnose(
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    moments: Sequence[StoredMoments],
    names: Mapping[str, Sequence[str]],
    report: Report = lambda _done, _total: None,
) -> NetworkDiagnosis:
    """Judge the merges of every linear layer; one layer of each model is in memory at a time.

    Args:
        base: The base model.
        experts: Its fine-tunes.
        moments: Of each expert, on its own examples.
        names: The tensors that all models have with one shape: by the base's name, that in each expert.
        report: Is told how many layers are done.

    Raises:
        CalibrationError: if the moments are not one for each expert and of that expert; if they lack a layer
            that others have; if the network cannot be built or nothing is left to judge.
        MethodError: if moments do not fit a layer.
        NonFiniteError: if a model holds NaN or infinity.
    """
    if len(moments) != len(experts):
        raise CalibrationError(
            f"{len(moments)} calibration statistics for {len(experts)} experts",
            "Give --calibration once for each expert, in their order; the base needs none.",
        )
    layers = linear_layers(base)
    for expert, stored in zip(experts, moments, strict=True):
        stored.require_model(expert)
    found: dict[str, LayerDiagnosis] = {}
    left_out: dict[str, str] = {}
    for number, layer in enumerate(layers):
        of_layer = names.get(layer.weight)
        if of_layer is None:
            left_out[layer.weight] = "not in every model with the same shape"
        elif not any(name in stored for name, stored in zip(of_layer, moments, strict=True)):
            left_out[layer.weight] = "no example reaches it"
        else:
            bias = names.get(layer.bias) if layer.bias is not None else None
            found[layer.weight] = _diagnose(base, experts, moments, layer, of_layer, bias)
        report(number + 1, len(layers))
    if not found:
        raise CalibrationError(
            f"{base.label}: no linear layer can be judged",
            "See with isthmus inspect, without --calibration, whether the models correspond.",
        )
    return NetworkDiagnosis(found, left_out)


def _diagnose(
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    moments: Sequence[StoredMoments],
    layer: Layer,
    names: Sequence[str],
    biases: Sequence[str] | None,
) -> LayerDiagnosis:
    own = [
        _inputs(stored, name, with_bias=biases is not None)
        for stored, name in zip(moments, names, strict=True)
    ]
    _, tau = base_and_task_vectors(base, experts, layer, names, biases)
    try:
        return diagnose_layer(
            tau, own, seeds=_seeds(layer.weight, len(experts)), bias=biases is not None
        )
    except MethodError as error:
        raise MethodError(f"{layer.weight}: {error.problem}", error.cure) from error


def _inputs(stored: StoredMoments, name: str, *, with_bias: bool) -> InputMoments:
    if name not in stored:
        raise CalibrationError(
            f"{stored.folder} has no inputs of the layer {name}, which other statistics have",
            "Remove the folder and run isthmus calibrate again, on examples that reach the layer.",
        )
    found = stored[name]
    return found if with_bias else found.without_constant()


def _seeds(weight: str, experts: int) -> list[int]:
    keys = (json.dumps([SEED, weight, expert]) for expert in range(experts))
    return [int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "big") for key in keys]
