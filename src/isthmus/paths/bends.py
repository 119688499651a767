"""Training the bends of a path: E over t ~ U(0, 1) of the loss at its point falls (Garipov et al. 2018, arXiv 1802.10026)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isthmus.errors import PathError
from isthmus.paths.mixing import Parameters, same_shape, wide
from isthmus.paths.path import Path

State = dict[str, Any]
"""Where a training stands: tensors, numbers, lists and dictionaries, as `torch.save` takes them."""

_KEEP_EVERY = 100


@dataclass(frozen=True)
class Step:
    """One step of a training.

    Attributes:
        number: Counted from 0.
        t: Where on the path the loss was taken.
        loss: Before the step.
    """

    number: int
    t: float
    loss: float


@dataclass(frozen=True)
class Trained:
    """A path with trained bends.

    Attributes:
        path: The same ends, new bends.
        losses: The loss before every step, each at its own t. Those of the training data: what the path is
            worth shows in its `profile` on other data.
        state: From which a training goes on.
    """

    path: Path
    losses: list[float]
    state: State


def train_bends(
    path: Path,
    loss: Callable[[Parameters, int], Tensor],
    *,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
    steps: int,
    generator: torch.Generator,
    schedule: Callable[[int], float] | None = None,
    trained: Collection[str] | None = None,
    state: State | None = None,
    report: Callable[[Step], None] | None = None,
    keep: Callable[[State], None] | None = None,
    keep_every: int = _KEEP_EVERY,
) -> Trained:
    """Move the bends of a path down the loss; its ends stay.

    Args:
        path: With bends; `Path.straight` gives them a start.
        loss: (parameters, step) → the loss, a scalar. Whatever it draws, such as a batch, it draws
            from the step's number, so that a training that goes on is the same as one that never stopped.
        optimizer: Makes an optimizer of the tensors to train: all of the first bend, all of the
            second, and so on, in the order of the first point's names.
        steps: How many in all, those of `state` included.
        generator: Of t; on the CPU.
        schedule: step → a factor for the optimizer's learning rates; 1 throughout if None.
        trained: The names of the tensors to train; every floating-point one if None. Leave out the
            running statistics of BatchNorm, which have no gradient but decay.
        state: From an earlier call with the same arguments. The training goes on, with the generator
            where it was, and ends with the bytes that an undisturbed one gives.
        report: Told of every step.
        keep: Given the state every `keep_every` steps and at the end, to be written to disk.
        keep_every: How often.

    Raises:
        PathError: A path without bends, no steps, a loss that is not finite (t and step named) or does not
            depend on the bends, or a state of another path.
    """
    if not path.bends:
        raise PathError(
            f"{path.curve!r} has no bends to train", "Take PolygonalChain() or Bezier()."
        )
    if steps < 1:
        raise PathError(f"{steps} steps train nothing", "Take one step or more.")
    training = _Training(path, trained, optimizer, generator)
    if state is not None:
        training.resume(state)
    while training.step < steps:
        number = training.step
        done = training.advance(loss, 1.0 if schedule is None else schedule(number))
        if report is not None:
            report(done)
        if keep is not None and (training.step % keep_every == 0 or training.step == steps):
            keep(training.state())
    return Trained(training.finished(), training.losses, training.state())


class _Training:
    """Bends as leaves of the graph, their optimizer, and where the training stands."""

    def __init__(
        self,
        path: Path,
        trained: Collection[str] | None,
        optimizer: Callable[[list[Tensor]], torch.optim.Optimizer],
        generator: torch.Generator,
    ) -> None:
        self.step = 0
        self.losses: list[float] = []
        self._generator = generator
        first = path.points[0]
        if trained is not None and (unknown := sorted(set(trained) - first.keys())):
            raise PathError(
                f"The models have no tensor {unknown[0]!r} to train",
                f"They have, among others, {next(iter(first))!r}.",
            )
        self.bends: list[dict[str, Tensor]] = []
        self._leaves: list[dict[str, Tensor]] = []
        for point in path.bends:
            bend, leaves = {}, {}
            for name in first:
                bend[name] = point[name].detach()
                if bend[name].is_floating_point() and (trained is None or name in trained):
                    bend[name] = wide(bend[name]).clone().requires_grad_()
                    leaves[name] = bend[name]
            self.bends.append(bend)
            self._leaves.append(leaves)
        self._flat = [leaf for leaves in self._leaves for leaf in leaves.values()]
        if not self._flat:
            raise PathError(
                "There is nothing to train in the bends", "Name floating-point tensors in trained=."
            )
        self._curve = path.curve
        self._path = Path(path.curve, (first, *self.bends, path.points[-1]))
        self.optimizer = optimizer(self._flat)
        self._rates = [group["lr"] for group in self.optimizer.param_groups]

    def advance(self, loss: Callable[[Parameters, int], Tensor], factor: float) -> Step:
        """One step at a random t."""
        t = float(torch.rand((), generator=self._generator, dtype=torch.float64))
        value = loss(self._path.at(t), self.step)
        number = float(value.detach())
        where = f"step {self.step}, t = {t:.4f}"
        if not math.isfinite(number):
            raise PathError(
                f"The loss is {number} at {where}",
                "Train with a smaller learning rate, and see that the ends are finite.",
            )
        if not value.requires_grad:
            raise PathError(
                f"The loss at {where} does not depend on the bends",
                "Compute it from the parameters given, with gradients on.",
            )
        # Bends away from t have no gradient there; 0 lets momentum and decay go on for all alike.
        gradients = torch.autograd.grad(value, self._flat, allow_unused=True)
        for leaf, gradient in zip(self._flat, gradients, strict=True):
            leaf.grad = torch.zeros_like(leaf) if gradient is None else gradient
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()
        done = Step(self.step, t, number)
        self.losses.append(number)
        self.step += 1
        return done

    def state(self) -> State:
        """A copy, which later steps leave alone."""
        return {
            "step": self.step,
            "losses": list(self.losses),
            "bends": [
                {name: leaf.detach().clone() for name, leaf in leaves.items()}
                for leaves in self._leaves
            ],
            "optimizer": _copied(self.optimizer.state_dict()),
            "generator": self._generator.get_state(),
        }

    def resume(self, state: State) -> None:
        """Go on from a state."""
        kept = state["bends"]
        if len(kept) != len(self._leaves) or any(
            bend.keys() != leaves.keys() for bend, leaves in zip(kept, self._leaves, strict=True)
        ):
            raise PathError(
                "The training to go on with has other bends",
                "Go on with the same models, curve and trained tensors, or start anew.",
            )
        with torch.no_grad():
            for bend, leaves in zip(kept, self._leaves, strict=True):
                for name, leaf in leaves.items():
                    same_shape(name, leaf, bend[name])
                    leaf.copy_(bend[name])
        self.optimizer.load_state_dict(_copied(state["optimizer"]))
        self._generator.set_state(state["generator"])
        self.step = state["step"]
        self.losses = list(state["losses"])

    def finished(self) -> Path:
        """The path with bends that carry no gradient."""
        bends = [{name: tensor.detach() for name, tensor in bend.items()} for bend in self.bends]
        return Path(self._curve, (self._path.points[0], *bends, self._path.points[-1]))


def _copied(value: Any) -> Any:
    """Tensors cloned, wherever they are in dictionaries and lists."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copied(part) for part in value)
    return value
