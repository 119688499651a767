"""The noise of a network's gradients on data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from isthmus.errors import TrainingError
from isthmus.optim.gradient_maps import matrix_blocks
from isthmus.optim.gradient_noise import GradientNoise
from isthmus.optim.parameter_groups import Fused, parameter_groups

TrainingBatch: TypeAlias = Mapping[str, Tensor] | Sequence[Tensor]
"""Examples along the first dimension of each tensor: what a forward takes, or inputs and targets."""

Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]

_IGNORED = -100
"""The label of transformers for positions that have none."""


def measured_noise(
    network: nn.Module,
    micro_batches: Iterable[TrainingBatch],
    loss: Loss | None = None,
    *,
    block: int = 4,
    sign_version: bool = False,
    spectral_version: bool = False,
    fused: Fused | None = None,
) -> GradientNoise:
    """Run a network forward and backward on micro-batches, one at a time, and sum up their gradients.

    Its mode is left as it is: dropout in training mode is part of the noise. Neither its parameters nor
    their `.grad` are touched.

    Args:
        network: Parameters that need no gradient are left out.
        micro_batches: Of equal size, drawn at random. A smaller last one is left out. Batches that were
            sorted by length or class show more noise than there is.
        loss: The mean loss of a batch; `model_loss` if None. A mean over tokens, as language models have it,
            weights examples by their length, and the noise is then that of texts of the mean length.
        block: See `GradientNoise`.
        sign_version: See `GradientNoise`.
        spectral_version: Keep what the spectral version needs, of the matrices that `parameter_groups`
            finds. Fused ones are split, and their parts called name[0], name[1] and so on.
        fused: See `parameter_groups`.

    Returns:
        The sums; `estimate`, `sign` and `spectral` tell the noise.

    Raises:
        TrainingError: nothing to differentiate, a loss that is not finite or does not depend on the
            parameters, micro-batches of different sizes or none, BatchNorm in training mode, with
            which a batch's gradient is no mean over its examples.
    """
    _require_examples_apart(network)
    parameters = {n: p for n, p in network.named_parameters() if p.requires_grad}
    groups = parameter_groups(
        network, fused=fused
    )  # refuses a network without trainable parameters
    parts = _parts(groups) if spectral_version else {}
    transposed = {n for group in groups if group.get("transposed") for n in group["names"]}
    matrices = {
        part
        for group in groups
        if spectral_version and group["kind"] == "matrices"
        for name in group["names"]
        for part in parts.get(name, [name])
    }
    noise: GradientNoise | None = None
    size, ended = 0, False
    for number, batch in enumerate(micro_batches):
        count = _examples(batch)
        if noise is None:
            size = count
            noise = GradientNoise(
                size,
                block=block,
                sign_version=sign_version,
                matrices=matrices,
                # Parts of a split one are cut with their outputs first.
                transposed=matrices & transposed,
            )
        if ended or count > size:
            raise TrainingError(
                f"micro-batch {number} has {count} examples, where those before have {size} or fewer",
                "make micro-batches of one size; only the last may be smaller, and is left out",
            )
        if count < size:
            ended = True
            continue
        gradients = _gradients(network, parameters, batch, loss or model_loss, number)
        noise.add(_cut(gradients, parts, transposed, groups))
        # Or two gradients are in memory while the next one is made.
        del gradients
    if noise is None:
        raise TrainingError("there are no micro-batches", "give some examples")
    return noise


def model_loss(network: nn.Module, batch: TrainingBatch) -> Tensor:
    """A transformers model's own loss.

    Args:
        network: Whose forward returns an object with a `loss` when it is given `labels`.
        batch: What forward takes. Without `labels`, a causal language model predicts its own input, padding
            left out.

    Raises:
        TrainingError: no labels where the model needs them, or no loss.
    """
    if not isinstance(batch, Mapping):
        raise TrainingError(
            "a batch without names has no loss of its own", "give measured_noise a loss function"
        )
    given = dict(batch)
    if "labels" not in given:
        if "CausalLM" not in type(network).__name__ and "LMHead" not in type(network).__name__:
            raise TrainingError(
                f"{type(network).__name__} needs labels for its loss",
                "put `labels` into the batches, or give a loss function",
            )
        labels = given["input_ids"].clone()
        mask = given.get("attention_mask")
        given["labels"] = labels if mask is None else labels.masked_fill(mask == 0, _IGNORED)
    loss = getattr(network(**given), "loss", None)
    if not isinstance(loss, Tensor):
        raise TrainingError(f"{type(network).__name__} returns no loss", "give a loss function")
    return loss


def _gradients(
    network: nn.Module,
    parameters: Mapping[str, nn.Parameter],
    batch: TrainingBatch,
    loss: Loss,
    number: int,
) -> dict[str, Tensor]:
    with torch.enable_grad():
        value = loss(network, batch)
        if value.numel() != 1 or not value.isfinite().all() or not value.requires_grad:
            raise TrainingError(
                f"the loss of micro-batch {number} is {value.detach().flatten()[:3].tolist()}, and must be "
                "one finite number that depends on the parameters",
                "average it over the examples; see that labels and weights are finite",
            )
        found = torch.autograd.grad(
            value.reshape(()), list(parameters.values()), allow_unused=True, materialize_grads=True
        )
    return dict(zip(parameters, found, strict=True))


def _parts(groups: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The names of the matrices in fused weights."""
    return {
        name: [f"{name}[{number}]" for number in range(len(group["split"]))]
        for group in groups
        if "split" in group
        for name in group["names"]
    }


def _cut(
    gradients: Mapping[str, Tensor],
    parts: Mapping[str, Sequence[str]],
    transposed: set[str],
    groups: Iterable[Mapping[str, Any]],
) -> dict[str, Tensor]:
    """The gradients with fused ones in parts."""
    if not parts:
        return dict(gradients)
    splits = {name: group.get("split") for group in groups for name in group["names"]}
    cut: dict[str, Tensor] = {}
    for name, gradient in gradients.items():
        if name in parts:
            blocks = matrix_blocks(gradient, name in transposed, splits[name])
            cut |= dict(zip(parts[name], blocks, strict=True))
        else:
            cut[name] = gradient
    return cut


def _examples(batch: TrainingBatch) -> int:
    tensors = list(batch.values() if isinstance(batch, Mapping) else batch)
    sizes = {len(tensor) for tensor in tensors}
    if len(sizes) != 1 or not min(sizes):
        raise TrainingError(
            f"a micro-batch holds tensors of {sorted(sizes)} examples",
            "the first dimension of all must be the same, the examples",
        )
    return sizes.pop()


def _require_examples_apart(network: nn.Module) -> None:
    for name, module in network.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            raise TrainingError(
                f"{name} normalises by its batch: the batch's gradient is no mean over its examples",
                "call network.eval(), and let BatchNorm track its statistics",
            )
