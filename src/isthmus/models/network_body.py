"""A whole network in memory, as a function of its parameters: what it gives without its task head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.checkpoints import Checkpoint
from isthmus.errors import CalibrationError, NonFiniteError
from isthmus.models.listening import Batch
from isthmus.models.network import Weights, empty_network


@dataclass(frozen=True, eq=False)
class NetworkBody:
    """The last hidden states of a network at its real tokens.

    Attributes:
        label: The checkpoint's, for errors.
        network: With its head; parameters on the meta device.
        body: What of it runs.
        weights: Where the numbers are.
        prefix: Begins the body's names in the network: `bert.`, or '' if it is all of it.
        metric: Rᵀ of shape [n, r], by which outputs are multiplied; None leaves them.
    """

    label: str
    network: nn.Module
    body: nn.Module
    weights: Weights
    prefix: str
    metric: Tensor | None = None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> NetworkBody:
        """The network that a checkpoint describes, with attention that has forward derivatives.

        Raises:
            CalibrationError: if it cannot be built, or has an encoder and a decoder.
        """
        network: Any = empty_network(checkpoint)
        if getattr(network.config, "is_encoder_decoder", False):
            raise CalibrationError(
                f"{checkpoint.label} is an encoder-decoder, whose outputs need a decoder's inputs too",
                "The network's output as objective serves encoders, decoders and vision transformers.",
            )
        network.set_attn_implementation("eager")
        if hasattr(network.config, "use_cache"):
            network.config.use_cache = False
        body = network.base_model
        name = next(name for name, module in network.named_modules() if module is body)
        prefix = f"{name}." if name else ""
        weights = Weights(network, checkpoint)
        return cls(checkpoint.label, network, body, weights, prefix)

    @property
    def size(self) -> int:
        """Parameters of the body."""
        return sum(parameter.numel() for parameter in self.body.parameters())

    def tensor(self, name: str) -> str:
        """The tensor in the checkpoint for one of the body's parameters."""
        return self.weights.source(f"{self.prefix}{name}")

    def parameters(self) -> dict[str, Tensor]:
        """The body's parameters in float32, tied ones once.

        Raises:
            CalibrationError: if the checkpoint lacks one, or has another shape.
            NonFiniteError: if one holds NaN or infinity.
        """
        modules = [
            f"{self.prefix}{name}".removesuffix(".") for name, _ in self.body.named_modules()
        ]
        with self.weights.loaded(modules):
            found = {name: one.detach() for name, one in self.body.named_parameters()}
        for name, value in found.items():
            if not torch.isfinite(value).all():
                raise NonFiniteError(
                    f"{self.label}: tensor {self.tensor(name)} holds NaN or infinity",
                    "A merge would spread it over the model. Leave this model out, or repair it.",
                )
        return found

    def outputs(self, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """The last hidden states at real tokens, in the metric, shape [T, n]; differentiable.

        Raises:
            CalibrationError: if the network does not run on the batch.
        """
        try:
            found = torch.func.functional_call(self.body, dict(parameters), kwargs=dict(batch))
        except Exception as error:  # whatever somebody's network makes of somebody's data
            raise CalibrationError(
                f"{self.label}: {type(self.body).__name__} does not run on the calibration "
                f"examples, or has no forward derivatives: {error}",
                "Use the tokenizer or image processor that belongs to the model; if it does, project "
                "layer by layer.",
            ) from error
        states = getattr(found, "last_hidden_state", None)
        if states is None:
            raise CalibrationError(
                f"{self.label}: {type(self.body).__name__} gives no last hidden state",
                "The network's output as objective serves encoders, decoders and vision transformers.",
            )
        real: Tensor = self._real(states, batch)
        return real if self.metric is None else real @ self.metric

    def _real(self, states: Tensor, batch: Batch) -> Tensor:
        mask = batch.get("attention_mask")
        if mask is None or bool(mask.all()):
            return states.reshape(-1, states.shape[-1])
        if states.shape[:-1] != mask.shape:
            raise CalibrationError(
                f"{self.label}: hidden states of shape {list(states.shape)} do not show which are "
                f"padding, where the attention mask has shape {list(mask.shape)}",
                "Give batches of examples of equal length.",
            )
        return states[mask.bool()]

    def reached(self, parameters: Mapping[str, Tensor], batches: Sequence[Batch]) -> list[str]:
        """The parameters that the outputs on some batch depend on: not a pooler's, for one."""
        leaves = {name: one.detach().requires_grad_() for name, one in parameters.items()}
        found: set[str] = set()
        for batch in batches:
            slopes = torch.autograd.grad(
                self.outputs(leaves, batch).sum(), list(leaves.values()), allow_unused=True
            )
            found |= {name for name, slope in zip(leaves, slopes, strict=True) if slope is not None}
        return [name for name in parameters if name in found]


def head_metric(body: NetworkBody) -> Tensor:
    """Rᵀ with RᵀR = WᵀW for the head W of a language model: ‖Rh‖ is the length of the logits Wh.

    Returns:
        Shape [n, r], r the rank of W, float32.

    Raises:
        CalibrationError: if no linear layer makes logits of the last hidden states, or its tensor is missing.
        NonFiniteError: if it holds NaN or infinity.
    """
    head: Any = getattr(body.network, "get_output_embeddings", lambda: None)()
    name = next((name for name, module in body.network.named_children() if module is head), None)
    if name is None or not isinstance(head, nn.Linear):
        raise CalibrationError(
            f"{body.label}: {type(body.network).__name__} has no linear head directly above the last "
            "hidden states",
            "Compare hidden states (logits=False), or name a causal language model as base.",
        )
    with body.weights.loaded([name]):
        weight = head.weight.detach()
    if not torch.isfinite(weight).all():
        raise NonFiniteError(
            f"{body.label}: tensor {body.weights.source(f'{name}.weight')} holds NaN or infinity",
            "Repair the base model, or compare hidden states (logits=False).",
        )
    gram = torch.zeros(weight.shape[1], weight.shape[1], dtype=torch.float64)
    for rows in torch.split(weight, 4096):  # a vocabulary in float64 would be large
        wide = rows.to(torch.float64)
        gram.addmm_(wide.mT, wide)
    values, vectors = torch.linalg.eigh(gram)
    kept = values > 1e-14 * values[-1]
    metric: Tensor = (vectors[:, kept] * values[kept].sqrt()).to(weight.dtype)
    return metric
