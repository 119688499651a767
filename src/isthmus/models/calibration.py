"""The inputs of every linear layer on calibration data, with one block of the network in memory.

First the embeddings run on all examples, then block after block on the outputs of the one before it,
then what follows the blocks. What is in memory at once is one block, or all that is outside the blocks,
with the activations of all examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.checkpoints import Checkpoint, open_checkpoint
from isthmus.errors import CalibrationError, MethodError
from isthmus.models.blocks import Blocks, find_blocks
from isthmus.models.layers import linear_modules
from isthmus.models.network import Weights, empty_network
from isthmus.projection.statistics import InputMoments, with_constant

Batch = Mapping[str, Tensor]
"""What a network's forward takes, by name; `attention_mask` of shape [B, T] is 0 at padding."""

Moments = dict[str, InputMoments]

Report = Callable[[int, int], None]
"""Told after every batch how many passes are done, and of how many."""


def calibrate(
    reference: str,
    batches: Sequence[Batch],
    *,
    keep: torch.dtype = torch.float32,
    report: Report = lambda _done, _total: None,
) -> Moments:
    """Σ xxᵀ of the inputs x of every linear layer of a model, all in memory at once.

    Every x ends with a constant 1 (`with_constant`), whether the layer has a bias or not.

    Args:
        reference: A model as `open_checkpoint` takes it, with a `config.json`.
        batches: The examples.
        keep: The number format of activations between blocks.
        report: Is told of progress.

    Returns:
        By the weight's name in the checkpoint; see `calibrate_checkpoint`.

    Raises:
        CalibrationError: if the model cannot be built or run block by block, or gives NaN.
        CheckpointError: if the model cannot be opened or read.
    """
    with open_checkpoint(reference) as checkpoint:
        parts = calibrate_checkpoint(checkpoint, batches, keep=keep, report=report)
        return {name: moments for part in parts for name, moments in part.items()}


def calibrate_checkpoint(
    checkpoint: Checkpoint,
    batches: Sequence[Batch],
    *,
    keep: torch.dtype = torch.float32,
    report: Report = lambda _done, _total: None,
) -> Iterator[Moments]:
    """As `calibrate_parts`, for a model on disk.

    Yields:
        By the weight's name in the checkpoint. Layers that have their input in common, such as query,
        key and value, share one object. An output embedding that is tied stands under the name of the
        input embedding.

    Raises:
        CalibrationError: if the model cannot be built or run block by block, gives NaN, or two of its
            linear layers have one weight.
        CheckpointError: if the model cannot be read.
    """
    network = empty_network(checkpoint)
    weights = Weights(network, checkpoint)
    seen: set[str] = set()
    for part in calibrate_parts(
        network, find_blocks(network), batches, weights=weights, keep=keep, report=report
    ):
        named: Moments = {}
        for layer, moments in part.items():
            name = weights.stored[layer]
            if name in seen:
                raise CalibrationError(
                    f"{checkpoint.label}: {name} is the weight of several linear layers",
                    "Their inputs cannot be told apart; this architecture is not supported.",
                )
            seen.add(name)
            named[name] = moments
        yield named


def calibrate_parts(
    network: nn.Module,
    blocks: Blocks,
    batches: Sequence[Batch],
    *,
    weights: Weights | None = None,
    keep: torch.dtype = torch.float32,
    report: Report = lambda _done, _total: None,
) -> Iterator[Moments]:
    """Moments by parts: one dictionary a block, the last for the layers outside the blocks.

    Linear layers are `nn.Linear`, and `Conv1D` of GPT-2, whose weight is transposed.

    Args:
        network: In evaluation mode.
        blocks: Each takes the output of the one before it, and gives a tensor, or a tuple that begins
            with it.
        batches: At least one.
        weights: Loads the parameters; None where the network has them.
        keep: The number format of activations between blocks.
        report: Is told of progress.

    Yields:
        By the parameter's name in the network. Layers that have their input in common share one object.

    Raises:
        CalibrationError: if the network does not run in blocks, or an input is NaN or infinite.
    """
    if not batches:
        raise CalibrationError("there are no calibration examples", "Give at least one.")
    run = _Run(network, blocks, batches, weights, keep)
    total = len(batches) * (len(blocks.names) + 1)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        report(done, total)

    run.embed()
    for number in range(len(blocks.names)):
        yield run.through_block(number, step)
    yield run.after_blocks(step)


class _Enough(Exception):  # noqa: N818
    """Leaves a forward pass that has given what was wanted."""


@dataclass
class _Call:
    """What a block is called with, apart from the hidden states."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    hidden: str | None
    """The keyword of the hidden states; None where they come first."""

    @classmethod
    def split(cls, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Tensor, _Call]:
        if arguments:
            return arguments[0], cls(arguments[1:], keywords, None)
        name = next(name for name, value in keywords.items() if isinstance(value, Tensor))
        rest = {key: value for key, value in keywords.items() if key != name}
        return keywords[name], cls((), rest, name)

    def on(self, block: nn.Module, hidden: Tensor) -> Any:
        if self.hidden is None:
            return block(hidden, *self.arguments, **self.keywords)
        return block(**{self.hidden: hidden}, **self.keywords)


class _Run:
    def __init__(
        self,
        network: nn.Module,
        blocks: Blocks,
        batches: Sequence[Batch],
        weights: Weights | None,
        keep: torch.dtype,
    ) -> None:
        self.network, self.blocks, self.batches = network, blocks, batches
        self.weights, self.keep = weights, keep
        self.modules = [network.get_submodule(name) for name in blocks.names]
        # Its outputs would be by far the largest tensor, and nothing follows.
        self.head = getattr(network, "get_output_embeddings", lambda: None)()
        self.states: list[Tensor] = []
        self.calls: list[list[_Call]] = []
        self.rest: tuple[Any, ...] | None = None
        """What a block gives beside the hidden states; None if it gives a tensor alone."""

    @torch.no_grad()
    def embed(self) -> None:
        """The first block's input, and the further arguments of every block, for all examples."""
        first, call = self._first_call()
        with self._loaded_block(0):
            self.rest = self._rest(call.on(self.modules[0], first))
        with self._loaded_outside():
            for batch in self.batches:
                hidden, calls = self._record(batch)
                self.states.append(hidden.to(self.keep))
                self.calls.append(calls)

    @torch.no_grad()
    def through_block(self, number: int, step: Callable[[], None]) -> Moments:
        """Replace the states by this block's outputs."""
        name, module = self.blocks.names[number], self.modules[number]
        layers = {_joined(name, part): layer for part, layer in linear_modules(module)}
        listener = _Listener(layers)
        with self._loaded_block(number), listener:
            for index, batch in enumerate(self.batches):
                listener.begin(batch)
                output = self.calls[index][number].on(module, self.states[index].float())
                hidden = output if isinstance(output, Tensor) else output[0]
                self.states[index] = hidden.to(self.keep)
                step()
        return listener.moments

    @torch.no_grad()
    def after_blocks(self, step: Callable[[], None]) -> Moments:
        """Run the network on the last block's outputs, the blocks being passed over."""
        outside = {*self.blocks.before, *self.blocks.after}
        layers = {name: layer for name, layer in linear_modules(self.network) if name in outside}
        listener = _Listener(layers, last=self.head)
        with self._loaded_outside(), listener:
            for index, batch in enumerate(self.batches):
                listener.begin(batch)
                last = self.states[index].float()
                forwards: list[Callable[..., Any]] = [self._pass_on for _ in self.modules]
                forwards[-1] = lambda *_arguments, _last=last, **_keywords: self._wrap(_last)
                with self._instead(forwards):
                    self._forward(batch)
                step()
        return listener.moments

    def _first_call(self) -> tuple[Tensor, _Call]:
        caught: list[tuple[Tensor, _Call]] = []

        def catch(*arguments: Any, **keywords: Any) -> None:
            caught.append(_Call.split(arguments, keywords))
            raise _Enough

        with self._loaded_outside(), self._instead([catch] * len(self.modules)):
            self._forward(self.batches[0])
        if not caught:
            raise self._not_in_blocks("its forward pass calls none of them")
        return caught[0]

    def _record(self, batch: Batch) -> tuple[Tensor, list[_Call]]:
        """Pass the first block's input over all blocks, and note what each is called with."""
        calls: list[_Call] = []
        states: list[Tensor] = []

        def recorder(number: int) -> Callable[..., Any]:
            def record(*arguments: Any, **keywords: Any) -> Any:
                hidden, call = _Call.split(arguments, keywords)
                if number != len(calls):
                    raise self._not_in_blocks(
                        f"{self.blocks.names[number]} runs out of turn or twice"
                    )
                if states and hidden is not states[-1]:
                    raise self._not_in_blocks(
                        f"{self.blocks.names[number]} does not take the output of the block before"
                    )
                self._require_apart(self.blocks.names[number], call)
                calls.append(call)
                # Another object each time, to be known again.
                states.append(hidden.view_as(hidden))
                return self._wrap(states[-1])

            return record

        with (
            self._instead([recorder(number) for number in range(len(self.modules))]),
            _Listener({}, last=self.head),
        ):
            self._forward(batch)
        if len(calls) != len(self.modules):
            raise self._not_in_blocks(f"{self.blocks.names[len(calls)]} is not called")
        return states[0], calls

    def _pass_on(self, *arguments: Any, **keywords: Any) -> Any:
        return self._wrap(_Call.split(arguments, keywords)[0])

    def _wrap(self, hidden: Tensor) -> Any:
        return hidden if self.rest is None else (hidden, *self.rest)

    def _rest(self, output: Any) -> tuple[Any, ...] | None:
        """What stands for a block's further outputs, such as attention weights, in a pass over it.

        They are not known then. A block that takes one all the same gets NaN, which is noticed.
        """
        if isinstance(output, Tensor):
            return None
        if not isinstance(output, tuple) or not output or not isinstance(output[0], Tensor):
            raise self._not_in_blocks("a block gives no tensor first")
        return tuple(
            torch.full_like(more, torch.nan, dtype=torch.float32)
            if isinstance(more, Tensor)
            else more
            for more in output[1:]
        )

    def _require_apart(self, name: str, call: _Call) -> None:
        """Refuse a block that takes more than hidden states from the one before it."""
        values = (*call.arguments, *call.keywords.values())
        if self.rest and any(isinstance(value, Tensor) and value.isnan().any() for value in values):
            raise self._not_in_blocks(f"{name} takes more than one output of the block before")

    def _not_in_blocks(self, reason: str) -> CalibrationError:
        return CalibrationError(
            f"{type(self.network).__name__} cannot be run block by block: {reason}",
            f"The blocks taken are {self.blocks.names[0]} to {self.blocks.names[-1]}; name others.",
        )

    def _forward(self, batch: Batch) -> None:
        keywords: dict[str, Any] = dict(batch)
        if hasattr(getattr(self.network, "config", None), "use_cache"):
            keywords["use_cache"] = False
        try:
            self.network(**keywords)
        except _Enough:
            return

    @contextmanager
    def _instead(self, forwards: Sequence[Callable[..., Any]]) -> Iterator[None]:
        """Other functions in the place of the blocks, whose attributes remain to be looked at."""
        for module, forward in zip(self.modules, forwards, strict=True):
            module.forward = forward
        try:
            yield
        finally:
            for module in self.modules:
                del module.forward

    @contextmanager
    def _loaded_block(self, number: int) -> Iterator[None]:
        name, module = self.blocks.names[number], self.modules[number]
        parts = [_joined(name, part) for part, _ in module.named_modules()]
        with nullcontext() if self.weights is None else self.weights.loaded(parts):
            yield

    @contextmanager
    def _loaded_outside(self) -> Iterator[None]:
        parts = [*self.blocks.before, *self.blocks.after]
        with nullcontext() if self.weights is None else self.weights.loaded(parts):
            yield


@dataclass
class _Listener:
    """Adds up the inputs of linear layers, while it is open."""

    layers: Mapping[str, nn.Module]
    last: nn.Module | None = None
    """Where the forward pass ends, if all other layers have been heard."""
    moments: Moments = field(default_factory=dict)

    def __enter__(self) -> _Listener:
        self._leaders: dict[str, str] = {}
        self._called: set[str] = set()
        self._hooks = ExitStack()
        for name, layer in self.layers.items():
            handle = layer.register_forward_pre_hook(
                lambda _module, arguments, keywords, _name=name: self._hear(
                    _name, arguments[0] if arguments else keywords["input"]
                ),
                with_kwargs=True,
            )
            self._hooks.callback(handle.remove)
        if self.last is not None:
            self._hooks.callback(self.last.register_forward_pre_hook(self._leave).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def begin(self, batch: Batch) -> None:
        """The inputs that come belong to this batch."""
        self._mask = batch.get("attention_mask")
        self._size = len(next(iter(batch.values())))
        self._heard: list[tuple[Tensor, str]] = []
        self._called.clear()

    def _leave(self, *_: object) -> None:
        if self._called == self.layers.keys():
            raise _Enough

    def _hear(self, name: str, x: Tensor) -> None:
        self._called.add(name)
        weight = f"{name}.weight"
        # The tensors are held until the batch ends, so that no other one can be taken for them.
        leader = next((other for heard, other in self._heard if heard is x), weight)
        known = self._leaders.setdefault(weight, leader)
        if known != leader:
            raise CalibrationError(
                f"{weight} has its input in common with {known} for some examples only",
                "Calibrate them apart.",
            )
        if leader != weight:
            self.moments.setdefault(weight, self.moments[leader])
            return
        self._heard.append((x, weight))
        if weight not in self.moments:
            self.moments[weight] = InputMoments.empty(x.shape[-1] + 1)
        try:
            self.moments[weight].add(with_constant(self._real(weight, x)))
        except MethodError as error:
            raise CalibrationError(
                f"{weight}: {error.problem}",
                "Look for NaN in the weights (isthmus inspect), or leave out the examples.",
            ) from error

    def _real(self, weight: str, x: Tensor) -> Tensor:
        """The vectors that stand for no padding, shape [..., n]."""
        mask = self._mask
        if mask is None or bool(mask.all()):
            return x
        leading = x.shape[:-1]
        if leading == mask.shape or leading == (mask.numel(),):
            return x.reshape(-1, x.shape[-1])[mask.reshape(-1).bool()]
        if leading == (self._size,):  # one vector an example, as a pooler takes
            return x
        raise CalibrationError(
            f"{weight}: inputs of shape {list(x.shape)} do not show which are padding, where the "
            f"attention mask has shape {list(mask.shape)}",
            "Give batches of examples of equal length.",
        )


def _joined(block: str, part: str) -> str:
    return f"{block}.{part}" if part else block
