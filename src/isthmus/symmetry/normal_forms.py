"""Networks with the gains of their norms absorbed, so that their stream can turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isthmus.errors import SymmetryError
from isthmus.symmetry.architectures import Architecture, Norm, Reader, architecture_of


@dataclass(frozen=True)
class Absorbed:
    """The same function with norms of gain 1.

    Attributes:
        parameters: All tensors; those that changed are in the dtype that they had.
        architecture: Its symmetries, orthogonal matrices on the residual stream among them.
        config: The configuration; it differs where a head was untied from the embedding.
        untied: The tensors that stood for two before, by the name that was added.
    """

    parameters: dict[str, Tensor]
    architecture: Architecture
    config: dict[str, Any]
    untied: tuple[str, ...]


def absorb_norms(config: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> Absorbed:
    """Multiply the gains of all norms into the layers that read them.

    A linear layer that reads γ ⊙ n + β gives W(γ ⊙ n + β) + c = (W diag γ) n + (c + Wβ), so that γ goes
    into its matrix and β into its bias. Where a reader has no bias, as language models' heads, β stays,
    divided by γ. Then RMSNorm commutes with all orthogonal matrices of the stream, and LayerNorm, which
    subtracts the mean, with those that keep the vector of ones (Ashkboos et al. 2024, SliceGPT, arXiv
    2401.15024, section 3, for RMSNorm). A tied head is untied, unless its norm's gains are 1 already.

    Args:
        config: As in `config.json`.
        parameters: All tensors, by their names in the checkpoint.

    Raises:
        SymmetryError: An unknown family, norms that cannot be absorbed (they stand behind the blocks), or a gain
            of 0 with an offset that nothing takes.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    plain = architecture_of(config, shapes, residual="none")
    if plain.fixed:
        raise SymmetryError(
            f"The norms of a model of type {plain.family!r} cannot be absorbed: {plain.fixed}",
            "Take permutations of the stream, signed ones with RMSNorm.",
        )
    result = dict(parameters)
    changed = dict(config)
    untied: list[str] = []
    for norm in plain.norms:
        gain = _gain(norm, result)
        offset = None if norm.bias is None else result[norm.bias].double()
        if bool((gain == 1).all()) and not (offset is not None and _all_biased(norm, result)):
            continue
        for reader in norm.readers:
            if reader.weight not in result and reader.tied_to is not None:
                result[reader.weight] = result[reader.tied_to].clone()
                changed["tie_word_embeddings"] = False
                untied.append(reader.weight)
        if offset is not None and norm.bias is not None:
            result[norm.bias] = _left_of(norm, offset, gain, result).to(result[norm.bias].dtype)
        for reader in norm.readers:
            matrix = result[reader.weight]
            wide = matrix.double() * _along(gain, reader, matrix.ndim)
            result[reader.weight] = wide.to(matrix.dtype)
        one = torch.zeros_like if norm.plus_one else torch.ones_like
        result[norm.gain] = one(result[norm.gain])
    shapes = {name: tuple(tensor.shape) for name, tensor in result.items()}
    return Absorbed(
        result,
        architecture_of(changed, shapes, residual="orthogonal"),
        changed,
        tuple(untied),
    )


def _gain(norm: Norm, parameters: Mapping[str, Tensor]) -> Tensor:
    stored = parameters[norm.gain].double()
    return stored + 1 if norm.plus_one else stored


def _all_biased(norm: Norm, parameters: Mapping[str, Tensor]) -> bool:
    return all(reader.bias in parameters for reader in norm.readers)


def _left_of(norm: Norm, offset: Tensor, gain: Tensor, result: dict[str, Tensor]) -> Tensor:
    """What is left of β; what is not goes into the readers' biases."""
    if _all_biased(norm, result):
        for reader in norm.readers:
            matrix, bias = result[reader.weight].double(), result[reader.bias]
            added = torch.tensordot(matrix, offset, dims=([reader.dimension], [0]))
            result[reader.bias] = (bias.double() + added).to(bias.dtype)
        return torch.zeros_like(offset)
    lost = (gain == 0) & (offset != 0)
    if lost.any():
        raise SymmetryError(
            f"{norm.bias!r} adds to coordinate {int(lost.nonzero()[0])}, whose gain in {norm.gain!r} is 0, and a "
            "layer that reads it has no bias",
            "These norms cannot be absorbed; take permutations of the stream.",
        )
    return torch.where(gain == 0, 0.0, offset / torch.where(gain == 0, 1.0, gain))


def _along(gain: Tensor, reader: Reader, dimensions: int) -> Tensor:
    shape = [1] * dimensions
    shape[reader.dimension] = -1
    return gain.reshape(shape)
