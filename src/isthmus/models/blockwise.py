"""Running a network block by block, with one block in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isthmus.errors import CalibrationError, IsthmusError
from isthmus.models.blocks import Blocks
from isthmus.models.listening import Batch, Enough
from isthmus.models.network import Weights
from isthmus.models.states import Keep, States


def joined(block: str, part: str) -> str:
    """The name in the network of a block's module, which is '' for the block itself."""
    return f"{block}.{part}" if part else block


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


class BlockRun:
    """Examples on their way through a network, block after block.

    Args:
        network: In evaluation mode; several runs may share it, one at a time.
        blocks: Each takes the output of the one before it, and gives a tensor, or a tuple that begins
            with it.
        batches: The examples.
        weights: Loads the parameters; None where the network has them.
        keep: How states are kept.

    Attributes:
        states: The input of the next block, for every batch; empty before `embed`.
        head: The layer that gives a language model's outputs, if it is one.
        past_blocks: Whether the pass that `after_blocks` makes has reached what follows the blocks.
    """

    def __init__(
        self,
        network: nn.Module,
        blocks: Blocks,
        batches: Sequence[Batch],
        weights: Weights | None,
        keep: Keep,
    ) -> None:
        self.network, self.blocks, self.batches = network, blocks, batches
        self.weights = weights
        self.modules = [network.get_submodule(name) for name in blocks.names]
        self.head: nn.Module | None = getattr(network, "get_output_embeddings", lambda: None)()
        self.states = States(keep)
        self.past_blocks = False
        self.calls: list[list[_Call]] = []
        self.rest: tuple[Any, ...] | None = None
        """What a block gives beside the hidden states; None if it gives a tensor alone."""

    @torch.no_grad()
    def embed(self) -> None:
        """Make the first block's input, and the further arguments of every block, for all batches.

        Raises:
            CalibrationError: if the network does not run in blocks.
        """
        first, call = self._first_call()
        with self.loaded_block(0):
            self.rest = self._rest(call.on(self.modules[0], first))
        with self.loaded_outside():
            for batch in self.batches:
                hidden, calls = self._record(batch)
                self.states.append(hidden)
                self.calls.append(calls)

    @torch.no_grad()
    def through_block(self, number: int, index: int) -> Tensor:
        """A block's output for a batch, shape as its state; the block must be loaded."""
        output = self.calls[index][number].on(self.modules[number], self.states[index])
        return output if isinstance(output, Tensor) else output[0]

    def replace_state(self, index: int, hidden: Tensor) -> None:
        """The input of the next block for a batch."""
        self.states[index] = hidden

    @torch.no_grad()
    def after_blocks(self, index: int) -> None:
        """Run the network on the last block's outputs for a batch, the blocks being passed over.

        What is outside the blocks must be loaded. A hook may raise `Enough`.
        """
        last = self.states[index]
        self.past_blocks = False

        def give_last(*_arguments: Any, **_keywords: Any) -> Any:
            self.past_blocks = True
            return self._wrap(last)

        with self._instead([*[self._pass_on for _ in self.modules[1:]], give_last]):
            self._forward(self.batches[index])

    def _first_call(self) -> tuple[Tensor, _Call]:
        caught: list[tuple[Tensor, _Call]] = []

        def catch(*arguments: Any, **keywords: Any) -> None:
            caught.append(_Call.split(arguments, keywords))
            raise Enough

        with self.loaded_outside(), self._instead([catch] * len(self.modules)):
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
            self._before_head(),
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
            f"The blocks taken are {self.blocks.names[0]} to {self.blocks.names[-1]}. In Python, "
            "calibrate_parts takes others; projection with objective: network needs none.",
        )

    def _forward(self, batch: Batch) -> None:
        keywords: dict[str, Any] = dict(batch)
        if hasattr(getattr(self.network, "config", None), "use_cache"):
            keywords["use_cache"] = False
        try:
            self.network(**keywords)
        except Enough:
            return
        except IsthmusError:
            raise
        except Exception as error:  # whatever a library makes of somebody's model
            raise CalibrationError(
                f"{type(self.network).__name__} cannot be run on the examples: {error}",
                "See that Transformers runs the model on texts or images alone.",
            ) from error

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
    def _before_head(self) -> Iterator[None]:
        """The outputs would be by far the largest tensor, and nothing that matters follows."""

        def leave(*_: object) -> None:
            raise Enough

        with ExitStack() as hooks:
            if self.head is not None:
                hooks.callback(self.head.register_forward_pre_hook(leave).remove)
            yield

    @contextmanager
    def loaded_block(self, number: int) -> Iterator[None]:
        """A block's parameters hold numbers as long as the context lasts."""
        name, module = self.blocks.names[number], self.modules[number]
        parts = [joined(name, part) for part, _ in module.named_modules()]
        with nullcontext() if self.weights is None else self.weights.loaded(parts):
            yield

    @contextmanager
    def loaded_outside(self) -> Iterator[None]:
        """The parameters outside the blocks hold numbers as long as the context lasts."""
        parts = [*self.blocks.before, *self.blocks.after]
        with nullcontext() if self.weights is None else self.weights.loaded(parts):
            yield
