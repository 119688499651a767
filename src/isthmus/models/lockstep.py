"""The merged network beside its experts, layer by layer, while it is being merged.

Every expert runs on its own examples, and the merged network on those of all. A layer's inputs are taken
once everything before it in the merged network is final; then it is solved, and the merged network goes on
with the new weight. What is in memory at once is one block of each network, or what is outside the blocks
of two of them, with the activations of all examples in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from isthmus.checkpoints import Checkpoint, align_names
from isthmus.errors import CalibrationError
from isthmus.models.blocks import find_blocks
from isthmus.models.blockwise import BlockRun, joined
from isthmus.models.calibration import Report
from isthmus.models.layers import Layer, linear_modules, named_layers
from isthmus.models.listening import Batch, Enough, add_inputs, listening, real_inputs
from isthmus.models.network import Weights, empty_network
from isthmus.models.states import Keep
from isthmus.projection.statistics import InputMoments


@dataclass
class SharedInput:
    """Linear layers that have their input in common, such as query, key and value.

    Inputs are of size n, and end with a constant 1 beyond that. x_m is the input in the merged network so
    far, x_e that in the expert, on the same examples.

    Attributes:
        layers: In the order in which they run.
        merged: Σ x_m x_mᵀ by task, [n + 1, n + 1] each.
        cross: Σ x_e x_mᵀ by task, [n + 1, n + 1] each.
        expert: Σ x_e x_eᵀ by task, [n + 1, n + 1] each.
    """

    layers: tuple[Layer, ...]
    merged: tuple[InputMoments, ...]
    cross: tuple[Tensor, ...]
    expert: tuple[InputMoments, ...]


Solve: TypeAlias = Callable[[SharedInput], None]
"""Makes the weights of some layers; from its return on, the merged checkpoint gives them."""


def run_in_lockstep(
    merged: Checkpoint,
    experts: Sequence[Checkpoint],
    batches: Sequence[Sequence[Batch]],
    solve: Solve,
    *,
    keep: Keep = Keep.FLOAT32,
    report: Report = lambda _done, _total: None,
) -> None:
    """Call `solve` for all linear layers in the order in which they run.

    Left out are layers before the blocks, those whose weight another layer or an embedding has too, those
    that the examples do not reach, and, outside the blocks, those that an expert does not have.

    Args:
        merged: The merged model, which reads every tensor as it is at the time.
        experts: Models of the same architecture; heads may differ.
        batches: The examples of each expert, at least one batch.
        solve: Is called once for every group of layers with a common input.
        keep: How activations wait between blocks.
        report: Is told of progress: how many batches have passed a block, or what follows the blocks.

    Raises:
        CalibrationError: if a model cannot be built or run block by block, gives NaN, calls a layer
            twice, or the models have not the same blocks; if there are no examples for an expert.
        CheckpointError: if a model cannot be read.
    """
    if not experts or len(experts) != len(batches) or not all(batches):
        raise CalibrationError(
            "there are not examples for every expert", "Give each at least one batch of its own."
        )
    lockstep = _Lockstep(merged, experts, batches, keep)
    total = lockstep.passes
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        report(done, total)

    lockstep.embed()
    for number in range(len(lockstep.merged.blocks)):
        lockstep.through_block(number, solve, step)
    lockstep.after_blocks(solve, step)


class _Model:
    """A checkpoint and its network."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.label = checkpoint.label
        self.network = empty_network(checkpoint)
        self.weights = Weights(self.network, checkpoint)
        self.found = find_blocks(self.network)
        self.blocks = self.found.names
        self.modules = dict(linear_modules(self.network))

    def run(self, batches: Sequence[Batch], keep: Keep) -> BlockRun:
        return BlockRun(self.network, self.found, batches, self.weights, keep)


@dataclass(frozen=True, slots=True)
class _Task:
    """The merged network and one expert on the examples of that expert."""

    model: _Model
    merged: BlockRun
    expert: BlockRun


@dataclass(frozen=True, slots=True)
class _Part:
    """A block of all networks, or what follows the blocks.

    Attributes:
        names: For every task, the layers' names in the merged network and those in the expert.
        through: Runs a network's part on the batch of a number.
        loaded: Holds a network's part in memory, if nothing else does.
    """

    names: Sequence[Mapping[str, str]]
    through: Callable[[BlockRun, int], object]
    loaded: Callable[[BlockRun], AbstractContextManager[None]]


class _Lockstep:
    def __init__(
        self,
        merged: Checkpoint,
        experts: Sequence[Checkpoint],
        batches: Sequence[Sequence[Batch]],
        keep: Keep,
    ) -> None:
        self.merged = _Model(merged)
        self.layers = named_layers(self.merged.network, self.merged.weights)
        self.tasks: list[_Task] = []
        for checkpoint, own in zip(experts, batches, strict=True):
            model = _Model(checkpoint)
            if len(model.blocks) != len(self.merged.blocks):
                raise CalibrationError(
                    f"{model.label} has {len(model.blocks)} blocks; {self.merged.label} has "
                    f"{len(self.merged.blocks)}",
                    "Merge models of one architecture.",
                )
            self.tasks.append(_Task(model, self.merged.run(own, keep), model.run(own, keep)))

    @property
    def passes(self) -> int:
        """How many batches pass a block, or what follows the blocks."""
        return (len(self.merged.blocks) + 1) * sum(len(task.expert.batches) for task in self.tasks)

    def embed(self) -> None:
        for task in self.tasks:
            task.merged.embed()
            task.expert.embed()

    def through_block(self, number: int, solve: Solve, step: Callable[[], None]) -> None:
        """Solve a block's layers, and replace all states by its outputs."""
        block = self.merged.network.get_submodule(self.merged.blocks[number])
        layers = {
            joined(self.merged.blocks[number], part): layer for part, layer in linear_modules(block)
        }
        size = len(self.merged.blocks[number])
        names = [
            {name: f"{task.model.blocks[number]}{name[size:]}" for name in layers}
            for task in self.tasks
        ]

        def through(run: BlockRun, index: int) -> Tensor:
            return run.through_block(number, index)

        part = _Part(names, through, lambda _run: nullcontext())
        with ExitStack() as loaded:
            loaded.enter_context(self.tasks[0].merged.loaded_block(number))
            for task in self.tasks:
                loaded.enter_context(task.expert.loaded_block(number))
            first = self.tasks[0].merged
            for group in _groups(layers, partial(through, first, 0)):
                self._solve_group(group, part, solve)
            for task in self.tasks:
                for index in range(len(task.expert.batches)):
                    for run in (task.merged, task.expert):
                        run.replace_state(index, through(run, index))
                    step()

    def after_blocks(self, solve: Solve, step: Callable[[], None]) -> None:
        """Solve the layers that follow the blocks."""
        outside = {*self.merged.found.before, *self.merged.found.after}
        layers = {name: part for name, part in self.merged.modules.items() if name in outside}
        names = [align_names(layers, task.model.modules) for task in self.tasks]

        # Embeddings and heads are large: no more than one expert's at a time.
        part = _Part(names, BlockRun.after_blocks, BlockRun.loaded_outside)
        first = self.tasks[0].merged
        with first.loaded_outside():
            for group in _groups(layers, partial(first.after_blocks, 0), first):
                common = [name for name in group if all(name in own for own in names)]
                self._solve_group(common, part, solve)
        for task in self.tasks:
            for _ in task.expert.batches:
                step()

    def _solve_group(self, group: Sequence[str], part: _Part, solve: Solve) -> None:
        """Take the inputs of layers, solve these, and load what came of it."""
        own = [name for name in group if name in self.layers]
        if not own:
            return
        found = [
            self._inputs(task, own[0], names[own[0]], part)
            for task, names in zip(self.tasks, part.names, strict=True)
        ]
        merged, cross, expert = zip(*found, strict=True)
        solve(SharedInput(tuple(self.layers[name] for name in own), merged, cross, expert))
        self.merged.weights.reload(own)

    def _inputs(
        self, task: _Task, name: str, own: str, part: _Part
    ) -> tuple[InputMoments, Tensor, InputMoments]:
        """The moments of one layer's inputs in one task: of the merged network, mixed, of the expert."""
        if own not in task.model.modules:
            raise CalibrationError(
                f"{task.model.label} has no linear layer {own}", "Merge models of one architecture."
            )
        sums: tuple[InputMoments, Tensor, InputMoments] | None = None
        sides = ((task.merged, self.merged, name), (task.expert, task.model, own))
        with part.loaded(task.expert):
            for index, batch in enumerate(task.expert.batches):
                pair = []
                for run, model, layer in sides:
                    label = f"{model.label}: {layer}.weight"
                    x = _input(model.modules[layer], partial(part.through, run, index))
                    if x is None:
                        raise CalibrationError(
                            f"{label} is reached by some examples only",
                            "Such a network cannot be merged layer after layer.",
                        )
                    pair.append((label, real_inputs(label, x, batch)))
                (_, x_m), (_, x_e) = pair
                if sums is None:
                    sums = (
                        InputMoments.empty(x_m.shape[-1]),
                        torch.zeros(x_e.shape[-1], x_m.shape[-1], dtype=torch.float64),
                        InputMoments.empty(x_e.shape[-1]),
                    )
                for moments, (label, inputs) in zip(sums[::2], pair, strict=True):
                    add_inputs(moments, label, inputs)
                _add_cross(sums[1], x_e, x_m)
        assert sums is not None, "every task has a batch"
        return sums


def _groups(
    layers: Mapping[str, nn.Module],
    run: Callable[[], object],
    past: BlockRun | None = None,
) -> list[list[str]]:
    """Layers that have their input in common, in the order in which they run.

    Args:
        layers: Those to listen to.
        run: Runs the network, or the block.
        past: If given, layers that run before its blocks are left out, and its head ends the pass as soon
            as all layers have been heard.

    Raises:
        CalibrationError: if a layer is called twice.
    """
    # The tensors are held until the end, so that no other one can be taken for them.
    heard: list[tuple[Tensor, list[str]]] = []
    called: set[str] = set()

    def hear(name: str, x: Tensor) -> None:
        if past is not None and not past.past_blocks:
            called.add(name)
            return
        if name in called:
            raise CalibrationError(
                f"{name} runs twice in one pass",
                "Its inputs cannot be told apart; such a network is not merged layer after layer.",
            )
        called.add(name)
        for other, names in heard:
            if other is x:
                names.append(name)
                return
        heard.append((x, [name]))

    def leave(*_: object) -> None:
        if called == layers.keys():
            raise Enough

    with ExitStack() as hooks:
        hooks.enter_context(listening(layers, hear))
        if past is not None and past.head is not None:
            hooks.callback(past.head.register_forward_pre_hook(leave).remove)
        run()
    return [names for _, names in heard]


def _input(layer: nn.Module, run: Callable[[], object]) -> Tensor | None:
    """What enters a layer in a pass, which ends there; None if the pass does not reach it."""
    caught: list[Tensor] = []

    def catch(_name: str, x: Tensor) -> None:
        caught.append(x)
        raise Enough

    with listening({"": layer}, catch), _left_early():
        run()
    return caught[0] if caught else None


def _add_cross(cross: Tensor, left: Tensor, right: Tensor) -> None:
    rows, others = (x.reshape(-1, x.shape[-1]).to(torch.float64) for x in (left, right))
    cross.addmm_(rows.mT, others)


@contextmanager
def _left_early() -> Iterator[None]:
    try:
        yield
    except Enough:
        return
