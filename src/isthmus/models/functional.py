"""A network as a function of its tensors: outputs, loss and accuracy of any point in weight space."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from isthmus.errors import PathError
from isthmus.paths.mixing import Parameters

Batch = Mapping[str, Tensor] | tuple[Tensor, Tensor] | list[Tensor]
"""What a network takes by name, `labels` among it where there are any; or inputs and labels."""

_IGNORED = -100
"""The label that Transformers gives to positions that do not count."""


class NetworkFunction:
    """An `nn.Module` whose tensors are given with every call (torch.func.functional_call).

    The module gives the architecture only: every parameter is to be given, one name of those that are tied,
    and so are the running statistics of BatchNorm. Nothing in it is changed. It runs as in evaluation, without
    dropout.

    What the loss is, the batch says:

    - a causal language model of Transformers: cross entropy of the next token, where neither token is
      padding (`attention_mask`) nor its label -100; labels are `input_ids` unless they are given;
    - integer labels: cross entropy, classes in the last dimension of the outputs, or in the second where
      that is what their shape says, as for images; -100 does not count;
    - floating-point labels of the outputs' shape: the mean of the squared errors, without an accuracy.

    Losses of the network's own, such as those that balance experts, are left out.

    Args:
        module: The network. Its parameters may be on the meta device.
        next_token: Whether outputs are predictions of the next token; by the class of the module if None.
    """

    def __init__(self, module: nn.Module, *, next_token: bool | None = None) -> None:
        self._module = module
        self.next_token = _is_causal_model(module) if next_token is None else next_token
        self._needed = _needed(module)
        self._known = set(module.state_dict(keep_vars=True))
        self._known.update(name for tied in self._needed for name in tied)
        self._is_transformers = hasattr(module, "config")

    @property
    def trainable(self) -> list[str]:
        """The parameters, tied ones once: without buffers, such as running statistics."""
        return [name for name, _ in self._module.named_parameters()]

    def outputs(
        self, parameters: Parameters, batch: Batch, *, batch_statistics: bool = False
    ) -> Tensor:
        """What the network gives for a batch; the logits where it gives several things.

        Args:
            parameters: By the names of the module's `state_dict`.
            batch: Labels in it are not shown to the network.
            batch_statistics: BatchNorm takes the statistics of the batch, as in training, and leaves the
                running ones alone.

        Raises:
            PathError: A tensor is missing or not the network's, or the batch has another form.
        """
        given = self._given(parameters, copied=batch_statistics)
        arguments, named = inputs_of(batch)
        if self.next_token and self._is_transformers:
            named = {**named, "use_cache": False}
        with running_as(self._module, batch_statistics):
            answer: Any = functional_call(self._module, given, arguments, named)
        return _logits(answer)

    def loss(
        self, parameters: Parameters, batch: Batch, *, batch_statistics: bool = False
    ) -> Tensor:
        """The mean loss of a batch, over tokens or examples; a float64 scalar, differentiable.

        Raises:
            PathError: see `summed_loss`; also if nothing in the batch counts.
        """
        total, count = self.summed_loss(parameters, batch, batch_statistics=batch_statistics)
        if count == 0:
            raise PathError(
                "Nothing in the batch has a label", "Give texts of two tokens at least, or labels."
            )
        return total / count

    def summed_loss(
        self, parameters: Parameters, batch: Batch, *, batch_statistics: bool = False
    ) -> tuple[Tensor, int]:
        """The sum of the losses of a batch, a float64 scalar, and over how many tokens or examples.

        Raises:
            PathError: see `outputs`; also for labels that are missing or of another shape.
        """
        outputs = self.outputs(parameters, batch, batch_statistics=batch_statistics)
        losses, _ = self._scores(outputs, batch)
        return losses.double().sum(), losses.shape[0]

    def evaluate(self, parameters: Parameters, batches: Iterable[Batch]) -> dict[str, float]:
        """`loss`, and `accuracy` where labels are classes: means over all tokens or examples of all batches.

        Raises:
            PathError: see `summed_loss`; also if there is no data, or none that counts.
        """
        total, count, right = 0.0, 0, 0
        classes = True
        with torch.no_grad():
            for batch in batches:
                losses, correct = self._scores(self.outputs(parameters, batch), batch)
                total += float(losses.double().sum())
                count += losses.shape[0]
                if correct is None:
                    classes = False
                else:
                    right += int(correct.sum())
        if count == 0:
            raise PathError(
                "There is no data to evaluate on",
                "Give a batch at least, with labels or with texts of two tokens and more.",
            )
        figures = {"loss": total / count}
        return figures | {"accuracy": right / count} if classes else figures

    def _given(self, parameters: Parameters, copied: bool) -> dict[str, Tensor]:
        """The tensors for functional_call, which would fill gaps with the module's own unasked."""
        names = parameters.keys()
        for tied in self._needed:
            if names.isdisjoint(tied):
                raise PathError(
                    f"{type(self._module).__name__} needs a tensor {tied[0]!r}, which is not given",
                    "Give all of its state_dict, by the names there.",
                )
        if unknown := names - self._known:
            raise PathError(
                f"{type(self._module).__name__} has no tensor {min(unknown)!r}",
                "Give the tensors by the names of its state_dict.",
            )
        given = dict(parameters)
        for tied in self._needed:
            first, *others = (name for name in tied if name in given)
            for name in others:
                if given.pop(name) is not given[first]:
                    raise PathError(
                        f"{first!r} and {name!r} are one tensor of {type(self._module).__name__}, and both "
                        "are given",
                        "Give one of them, or load the model without tied embeddings.",
                    )
        if copied:
            for name, buffer in self._module.named_buffers():
                given[name] = given.get(name, buffer).detach().clone()
        return given

    def _scores(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Losses and whether the prediction is right, each of shape [examples or tokens that count]."""
        labels = labels_of(batch)
        if self.next_token:
            return _next_tokens(outputs, batch, labels)
        if labels is None:
            raise PathError(
                "The batch has no labels",
                "Give labels, or (inputs, labels); causal language models alone do without.",
            )
        if labels.is_floating_point():
            if labels.shape != outputs.shape:
                raise _unfit(labels, outputs)
            return (outputs - labels).square().reshape(len(labels), -1).mean(1), None
        if outputs.ndim > 1 and labels.shape == outputs.shape[:-1]:
            logits = outputs
        elif outputs.ndim > 1 and labels.shape == (outputs.shape[0], *outputs.shape[2:]):
            logits = outputs.movedim(1, -1)
        else:
            raise _unfit(labels, outputs)
        return _classified(logits, labels, labels != _IGNORED)


def _next_tokens(
    outputs: Tensor, batch: Batch, labels: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    named = batch if isinstance(batch, Mapping) else {}
    if labels is None:
        labels = named.get("input_ids")
    if labels is None or outputs.ndim != 3 or labels.shape != outputs.shape[:2]:
        raise PathError(
            f"The next token is not known: outputs have the shape {list(outputs.shape)}, and "
            f"{'there are no input_ids' if labels is None else f'labels {list(labels.shape)}'}",
            "Give batches with input_ids [B, T], or with labels of that shape.",
        )
    counts = labels[:, 1:] != _IGNORED
    mask = named.get("attention_mask")
    if mask is not None and mask.shape == labels.shape:
        counts = counts & mask[:, 1:].bool() & mask[:, :-1].bool()
    return _classified(outputs[:, :-1], labels[:, 1:], counts)


def _classified(logits: Tensor, labels: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    chosen, right = logits[counts], labels[counts].long()
    classes = logits.shape[-1]
    if len(right) and not 0 <= int(right.min()) <= int(right.max()) < classes:
        raise PathError(
            f"There are labels from {int(right.min())} to {int(right.max())}, where the network has "
            f"{classes} classes",
            "Number classes from 0; -100 marks what does not count.",
        )
    chosen = chosen.to(torch.promote_types(chosen.dtype, torch.float32))
    losses = nn.functional.cross_entropy(chosen, right, reduction="none")
    return losses, chosen.detach().argmax(-1) == right


def _unfit(labels: Tensor, outputs: Tensor) -> PathError:
    return PathError(
        f"Labels of shape {list(labels.shape)} do not fit outputs of shape {list(outputs.shape)}",
        "Give a class for every prediction, or numbers of the outputs' shape.",
    )


def inputs_of(batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """The positional and the named arguments of a network for a batch, without its labels.

    Raises:
        PathError: The batch is neither a mapping nor inputs and labels.
    """
    if isinstance(batch, Mapping):
        return (), {name: value for name, value in batch.items() if name != "labels"}
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise PathError(
            f"A batch is a mapping of names to tensors, or (inputs, labels), not a {type(batch).__name__}",
            "Pair the inputs with their labels.",
        )
    return (batch[0],), {}


def labels_of(batch: Batch) -> Tensor | None:
    """The labels in a batch, if there are any."""
    return batch.get("labels") if isinstance(batch, Mapping) else batch[1]


@contextmanager
def running_as(module: nn.Module, batch_statistics: bool) -> Iterator[None]:
    """The module as in evaluation, only BatchNorm as in training if asked; then as before."""
    before = {each: each.training for each in module.modules()}
    try:
        for each in before:
            each.training = batch_statistics and isinstance(each, nn.modules.batchnorm._BatchNorm)
        yield
    finally:
        for each, training in before.items():
            each.training = training


def _needed(module: nn.Module) -> list[list[str]]:
    """Names of which one is to be given: those of each parameter, and of every running statistic."""
    by_object: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        by_object.setdefault(id(parameter), []).append(name)
    statistics = [
        [f"{name}.{kind}" if name else kind]
        for name, each in module.named_modules()
        if isinstance(each, nn.modules.batchnorm._BatchNorm) and each.running_mean is not None
        for kind in ("running_mean", "running_var")
    ]
    return [*by_object.values(), *statistics]


def _is_causal_model(module: nn.Module) -> bool:
    """Whether Transformers lists its class, or one that it derives from, as a causal language model."""
    if not hasattr(module, "config"):
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known: Collection[Any] = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    return any(kind.__name__ in known for kind in type(module).__mro__)


def _logits(answer: Any) -> Tensor:
    if isinstance(answer, Tensor):
        return answer
    found = getattr(answer, "logits", None)
    if found is None and isinstance(answer, (tuple, list)) and answer:
        found = answer[0]
    if not isinstance(found, Tensor):
        raise PathError(
            f"The network gives a {type(answer).__name__} without logits",
            "Take a model with a head, such as AutoModelForCausalLM or "
            "AutoModelForSequenceClassification.",
        )
    return found
