"""The inputs of every linear layer on calibration data, with one block of the network in memory.

First the embeddings run on all examples, then block after block on the outputs of the one before it,
then what follows the blocks. What is in memory at once is one block, or all that is outside the blocks,
with the activations of all examples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from torch import Tensor, nn

from isthmus.checkpoints import Checkpoint, open_checkpoint
from isthmus.errors import CalibrationError
from isthmus.models.blocks import Blocks, find_blocks
from isthmus.models.blockwise import BlockRun, joined
from isthmus.models.layers import linear_modules
from isthmus.models.listening import Batch, Enough, add_inputs, listening, real_inputs
from isthmus.models.network import Weights, empty_network
from isthmus.models.states import Keep
from isthmus.projection.statistics import InputMoments

Moments = dict[str, InputMoments]

Report = Callable[[int, int], None]
"""Told after every batch how many passes are done, and of how many."""


def calibrate(
    reference: str,
    batches: Sequence[Batch],
    *,
    keep: Keep = Keep.FLOAT32,
    report: Report = lambda _done, _total: None,
) -> Moments:
    """Σ xxᵀ of the inputs x of every linear layer of a model, all in memory at once.

    Every x ends with a constant 1 (`with_constant`), whether the layer has a bias or not.

    Args:
        reference: A model as `open_checkpoint` takes it, with a `config.json`.
        batches: The examples.
        keep: How activations wait between blocks.
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
    keep: Keep = Keep.FLOAT32,
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
    keep: Keep = Keep.FLOAT32,
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
        keep: How activations wait between blocks.
        report: Is told of progress.

    Yields:
        By the parameter's name in the network. Layers that have their input in common share one object.

    Raises:
        CalibrationError: if the network does not run in blocks, or an input is NaN or infinite.
    """
    if not batches:
        raise CalibrationError("there are no calibration examples", "Give at least one.")
    run = BlockRun(network, blocks, batches, weights=weights, keep=keep)
    total = len(batches) * (len(blocks.names) + 1)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        report(done, total)

    run.embed()
    for number, name in enumerate(blocks.names):
        block = network.get_submodule(name)
        listener = _Listener({joined(name, part): layer for part, layer in linear_modules(block)})
        with run.loaded_block(number), listener:
            for index, batch in enumerate(batches):
                listener.begin(batch)
                run.replace_state(index, run.through_block(number, index))
                step()
        yield listener.moments
    outside = {*blocks.before, *blocks.after}
    layers = {name: layer for name, layer in linear_modules(network) if name in outside}
    listener = _Listener(layers, last=run.head)
    with run.loaded_outside(), listener:
        for index, batch in enumerate(batches):
            listener.begin(batch)
            run.after_blocks(index)
            step()
    yield listener.moments


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
        self._hooks.enter_context(listening(self.layers, self._hear))
        if self.last is not None:
            self._hooks.callback(self.last.register_forward_pre_hook(self._leave).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def begin(self, batch: Batch) -> None:
        """The inputs that come belong to this batch."""
        self._batch = batch
        self._heard: list[tuple[Tensor, str]] = []
        self._called.clear()

    def _leave(self, *_: object) -> None:
        if self._called == self.layers.keys():
            raise Enough

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
        add_inputs(self.moments[weight], weight, real_inputs(weight, x, self._batch))
