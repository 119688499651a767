"""A network without its numbers: they come from a checkpoint, for the parts that are about to run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isthmus.checkpoints import Checkpoint, align_names
from isthmus.errors import CalibrationError, NonFiniteError


def empty_network(checkpoint: Checkpoint) -> nn.Module:
    """The network that a checkpoint's `config.json` describes, its parameters on the meta device.

    Buffers are real, as most are computed and in no file.

    Raises:
        CalibrationError: if there is no configuration, or Transformers does not know the model.
    """
    import transformers

    config = checkpoint.config or {}
    names = config.get("architectures") or []
    architecture = getattr(transformers, names[0], None) if names else None
    # Old configurations lack the type, which the architecture implies.
    kind = config.get("model_type") or getattr(architecture, "__name__", None)
    if kind is None:
        raise CalibrationError(
            f"{checkpoint.label} has no config.json with a model_type",
            "Name a folder in the Hub's layout, or add the model_type to its config.json.",
        )
    try:
        if "model_type" in config:
            describes = transformers.CONFIG_MAPPING[kind]
        else:
            describes = getattr(architecture, "config_class", None)
        described = describes.from_dict(dict(config))
        with _parameters_on_meta():
            if architecture is None:
                network: nn.Module = transformers.AutoModel.from_config(described)
            else:
                network = architecture(described)
    except Exception as error:  # whatever a library makes of somebody's configuration
        raise CalibrationError(
            f"{checkpoint.label}: Transformers cannot build a model of type {kind!r}: {error}",
            "Models that bring code of their own are not run; a newer Transformers may know it.",
        ) from error
    stored = any("pooler." in name for name in checkpoint.tensors)
    if getattr(network, "pooler", None) is not None and not stored:
        # An encoder saved without its pooler has a config.json that does not tell.
        network.register_module("pooler", None)
    return network.eval().requires_grad_(False)


class Weights:
    """Loads a network's parameters in float32, part by part.

    Args:
        network: As `empty_network` gives it.
        checkpoint: Where the numbers are.

    Attributes:
        stored: The tensor in the checkpoint for every parameter and buffer that has one. Tied
            parameters have the same one.
    """

    def __init__(self, network: nn.Module, checkpoint: Checkpoint) -> None:
        self._network = network
        self._checkpoint = checkpoint
        self.stored = _stored_names(network, checkpoint)
        for name, buffer in network.named_buffers():
            if name in self.stored:
                buffer.copy_(self._read(name, tuple(buffer.shape)))

    @contextmanager
    def loaded(self, modules: Sequence[str]) -> Iterator[None]:
        """The own parameters of these modules hold numbers as long as the context lasts.

        Raises:
            CalibrationError: if the checkpoint lacks one, or has another shape.
            NonFiniteError: if one holds NaN or infinity.
        """
        slots = [
            (module, key, f"{name}.{key}" if name else key)
            for name in modules
            for module in [self._network.get_submodule(name)]
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        empty = [module._parameters[key] for module, key, _ in slots]
        numbers: dict[str, nn.Parameter] = {}
        try:
            for module, key, name in slots:
                source = self.source(name)
                if source not in numbers:
                    shape = tuple(module._parameters[key].shape)  # type: ignore[union-attr]
                    numbers[source] = nn.Parameter(
                        self._read_finite(name, shape), requires_grad=False
                    )
                module._parameters[key] = numbers[source]
            yield
        finally:
            for (module, key, _), parameter in zip(slots, empty, strict=True):
                module._parameters[key] = parameter

    def reload(self, modules: Sequence[str]) -> None:
        """Read the own parameters of these modules again, which are loaded at the time.

        Raises:
            CalibrationError, NonFiniteError: as `loaded` does.
        """
        for name in modules:
            for key, parameter in self._network.get_submodule(name)._parameters.items():
                if parameter is not None:
                    parameter.copy_(self._read_finite(f"{name}.{key}", tuple(parameter.shape)))

    def source(self, name: str) -> str:
        """The tensor in the checkpoint for a parameter.

        Raises:
            CalibrationError: if there is none.
        """
        if name not in self.stored:
            raise CalibrationError(
                f"{self._checkpoint.label} has no tensor for {name}, which "
                f"{type(self._network).__name__} needs",
                "Transformers would fill it at random: save the model with save_pretrained from the class "
                "that config.json names. Or it joins it of several, as for mixtures of experts: these "
                "cannot be run here.",
            )
        return self.stored[name]

    def _read_finite(self, name: str, shape: tuple[int, ...]) -> Tensor:
        # A buffer may hold infinity, as masks of attention do.
        numbers = self._read(name, shape)
        if not numbers.isfinite().all():
            raise NonFiniteError(
                f"{self._checkpoint.label}: tensor {self.source(name)} holds NaN or infinity",
                "A model that is run on calibration data must be finite. Repair it, or leave it out.",
            )
        return numbers

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        source = self.source(name)
        info = self._checkpoint.tensors[source]
        if info.shape != shape:
            raise CalibrationError(
                f"{self._checkpoint.label}: {source} has shape {list(info.shape)}, where config.json "
                f"makes it {list(shape)}",
                "See that weights and config.json belong together.",
            )
        out = np.empty(info.numel, np.float32)
        self._checkpoint.read(source, 0, out)
        return torch.from_numpy(out).view(shape)


def _stored_names(network: nn.Module, checkpoint: Checkpoint) -> dict[str, str]:
    """For parameters and buffers, as far as the checkpoint has them, its name for each."""
    wanted = dict(network.state_dict(keep_vars=True))
    rename = _renaming(network, wanted)
    found: dict[str, str] = {}
    for name in (*checkpoint.tensors, *checkpoint.tied):
        here = rename(name)
        if here in wanted:
            found.setdefault(here, name)
    used = set(found.values())
    found |= align_names(
        [name for name in wanted if name not in found],
        [name for name in checkpoint.tensors if name not in used],
    )
    found = {here: checkpoint.tied.get(name, name) for here, name in found.items()}
    # Parameters that are one object have one tensor, under whichever of the names it is stored.
    by_object = {id(wanted[here]): name for here, name in found.items()}
    return {here: by_object[id(value)] for here, value in wanted.items() if id(value) in by_object}


def _renaming(network: nn.Module, wanted: Mapping[str, Tensor]) -> Callable[[str], str]:
    """Transformers' own translation of stored names, which it has had since version 5."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:
        return lambda name: name
    rules = get_model_conversion_mapping(network)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    prefix: Any = getattr(network, "base_model_prefix", None)

    def rename(name: str) -> str:
        if name in wanted:
            return name
        renamed, _ = rename_source_key(name, renamings, [], prefix or None, wanted)
        return str(renamed)

    return rename


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Every parameter that is registered goes to the meta device, so that none takes memory."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
