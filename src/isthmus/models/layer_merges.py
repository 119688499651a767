"""Merging all linear layers of a network on calibration data, one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from isthmus.checkpoints import Checkpoint
from isthmus.errors import CalibrationError, MethodError
from isthmus.models.calibration import Report, calibrate_checkpoint
from isthmus.models.layers import Layer
from isthmus.models.listening import Batch
from isthmus.models.lockstep import SharedInput, run_in_lockstep
from isthmus.models.matrices import base_and_task_vectors
from isthmus.models.merged_view import MergedView
from isthmus.models.solved import MULTIPLIERS, SolvedLayers
from isthmus.models.states import Keep
from isthmus.models.store import StoredMoments
from isthmus.projection.layer import LayerMerge, Rule, merge_layer
from isthmus.projection.objective import LayerObjective, expert_objective, sequential_objective
from isthmus.projection.statistics import InputMoments

Examples: TypeAlias = Sequence[Batch] | StoredMoments
"""What an expert is calibrated on: its examples, or what is known of its inputs already."""


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How one layer will be merged.

    Attributes:
        number: Its place in the order of the network.
        layer: Its tensors in the donor.
        weights_of: The tensor of the weight in each expert.
        biases_of: That of the bias, if all have one.
        rule: How.
        weights: ω_k; an input of task k counts ω_k / (their number).
        seeds: For the draws of DARE, which is reported beside the merge.
        wide: Whether the result is kept in float64.
    """

    number: int
    layer: Layer
    weights_of: tuple[str, ...]
    biases_of: tuple[str, ...] | None
    rule: Rule
    weights: tuple[float, ...]
    seeds: tuple[int, ...]
    wide: bool = False

    @property
    def tensors(self) -> tuple[str, ...]:
        """What it makes: the weight, and the bias if all models have one."""
        bias = self.layer.bias if self.biases_of is not None else None
        return (self.layer.weight,) if bias is None else (self.layer.weight, bias)


@dataclass(frozen=True)
class LayerMerges:
    """The merge of a network's layers.

    Attributes:
        donor: The base model.
        experts: In the order of the plans' names.
        plans: In the order of the network.
        solved: Where the results go; layers that are there already stay.
        multipliers: Whether to keep, beside each weight, how its task vectors were scaled.
        keep: How activations wait between blocks.
    """

    donor: Checkpoint
    experts: Sequence[Checkpoint]
    plans: Sequence[LayerPlan]
    solved: SolvedLayers
    multipliers: bool = False
    keep: Keep = Keep.FLOAT32

    def apart(self, examples: Sequence[Examples], report: Report) -> None:
        """Every layer by itself, on the inputs that it has in each expert.

        Args:
            examples: Of each expert.
            report: Is told of progress, in passes of batches through blocks.

        Raises:
            CalibrationError: if a model cannot be run on its examples.
            MethodError: if a layer cannot be merged.
            OutputError: if the disk is full.
        """
        if self.solved.complete:
            return
        total = sum(
            _passes(expert, own) for expert, own in zip(self.experts, examples, strict=True)
        )
        step = _Steps(report, total)
        parts = [
            _parts(expert, own, self.keep, step)
            for expert, own in zip(self.experts, examples, strict=True)
        ]
        for side_by_side in _rounds(parts):
            for plan in self.plans:
                named = list(zip(side_by_side, plan.weights_of, strict=True))
                if not self.solved.has(plan.number) and all(name in part for part, name in named):
                    with _naming(plan):
                        self._solve_apart(plan, [part[name] for part, name in named])
        self._average_rest()

    def in_sequence(
        self,
        view: MergedView,
        examples: Sequence[Sequence[Batch]],
        report: Report,
        *,
        own_targets: bool,
    ) -> None:
        """Layer after layer, on the inputs that the layers merged before produce.

        Args:
            view: The merged model, which reads from `solved`.
            examples: Of each expert.
            report: Is told of progress.
            own_targets: Whether a layer's outputs shall be those that the expert's layer gives in the expert,
                or those that it gives on the merged inputs.

        Raises:
            CalibrationError: if a model cannot be run on its examples.
            MethodError: if a layer cannot be merged.
            OutputError: if the disk is full.
        """
        if self.solved.complete:
            return
        planned = {plan.layer.weight: plan for plan in self.plans}

        def solve(shared: SharedInput) -> None:
            for layer in shared.layers:
                plan = planned.get(layer.weight)
                if plan is not None and not self.solved.has(plan.number):
                    with _naming(plan):
                        self._solve_shared(plan, shared, own_targets=own_targets)

        run_in_lockstep(view, self.experts, examples, solve, keep=self.keep, report=report)
        self._average_rest()

    def _solve_apart(self, plan: LayerPlan, inputs: Sequence[InputMoments]) -> None:
        base, tau = self._matrices(plan)
        moments = [_sized(one, tau.shape[2]) for one in inputs]
        weights = _per_input(plan.weights, moments)
        self._merge(plan, base, tau, expert_objective(tau, moments, weights), moments, weights)

    def _solve_shared(self, plan: LayerPlan, shared: SharedInput, *, own_targets: bool) -> None:
        base, tau = self._matrices(plan)
        size = tau.shape[2]
        merged = [_sized(one, size) for one in shared.merged]
        weights = _per_input(plan.weights, merged)
        if own_targets:
            own = [_sized(one, size) for one in shared.expert]
            cross = [one[:size, :size] for one in shared.cross]
            objective = sequential_objective(base, tau, merged, cross, own, weights)
        else:
            objective = expert_objective(tau, merged, weights)
        self._merge(plan, base, tau, objective, merged, weights)

    def _merge(
        self,
        plan: LayerPlan,
        base: Tensor,
        tau: Tensor,
        objective: LayerObjective,
        moments: Sequence[InputMoments],
        weights: Sequence[float],
    ) -> None:
        found = merge_layer(plan.rule, tau, objective, moments, weights, plan.seeds)
        self._keep(plan, base + found.correction, _record(plan, found), found.multipliers)

    def _average_rest(self) -> None:
        for plan in self.plans:
            if not self.solved.has(plan.number):
                self._average(plan)

    def _average(self, plan: LayerPlan) -> None:
        """What stands for a layer that the examples do not reach."""
        base, tau = self._matrices(plan)
        shares = tau.new_tensor(plan.weights) / sum(plan.weights)
        mean = base + torch.einsum("k,kmn->mn", shares, tau)
        note = "no example reaches this layer; its weight is the mean of the experts'"
        self._keep(plan, mean, {"weight": plan.layer.weight, "notes": [note]})

    def _keep(
        self,
        plan: LayerPlan,
        merged: Tensor,
        record: Mapping[str, Any],
        multipliers: Tensor | None = None,
    ) -> None:
        weight, *bias = plan.tensors
        columns = merged[:, : merged.shape[1] - len(bias)]
        tensors = {weight: columns.mT if plan.layer.transposed else columns}
        if bias:
            tensors[bias[0]] = merged[:, -1]
        wide = torch.float64 if plan.wide else torch.float32
        kept = {name: tensor.to(wide) for name, tensor in tensors.items()}
        if self.multipliers and multipliers is not None:
            kept[MULTIPLIERS] = multipliers
        self.solved.add(plan.number, kept, record)

    def _matrices(self, plan: LayerPlan) -> tuple[Tensor, Tensor]:
        """The base's weight, shape [m, n], and the task vectors [K, m, n], the bias as a last column."""
        biases = plan.biases_of
        return base_and_task_vectors(self.donor, self.experts, plan.layer, plan.weights_of, biases)


@contextmanager
def _naming(plan: LayerPlan) -> Iterator[None]:
    """Errors of the mathematics name the layer."""
    try:
        yield
    except MethodError as error:
        raise MethodError(f"{plan.layer.weight}: {error.problem}", error.cure) from error


class _Steps:
    """One count for several models that are run in turn."""

    def __init__(self, report: Report, total: int) -> None:
        self._report, self._total, self._done = report, total, 0

    def __call__(self, _done: int, _total: int) -> None:
        self._done += 1
        self._report(self._done, self._total)


def _parts(
    expert: Checkpoint, examples: Examples, keep: Keep, step: _Steps
) -> Iterator[Mapping[str, InputMoments]]:
    """Moments of an expert's layers, block by block where they are computed."""
    if isinstance(examples, StoredMoments):
        yield examples
        return
    try:
        yield from calibrate_checkpoint(expert, examples, keep=keep, report=step)
    except CalibrationError as error:
        if error.problem.startswith(expert.label):
            raise
        raise CalibrationError(f"{expert.label}: {error.problem}", error.cure) from error


def _rounds(
    experts: Sequence[Iterator[Mapping[str, InputMoments]]],
) -> Iterator[list[Mapping[str, InputMoments]]]:
    """The parts of all experts side by side, one of each at a time; the last one stays when others have more."""
    parts: list[Mapping[str, InputMoments]] = [{} for _ in experts]
    while True:
        more = False
        for number, one in enumerate(experts):
            part = next(one, None)
            if part is not None:
                parts[number], more = part, True
        if not more:
            return
        yield parts


def _passes(expert: Checkpoint, examples: Examples) -> int:
    from isthmus.models.blocks import find_blocks
    from isthmus.models.network import empty_network

    if isinstance(examples, StoredMoments):
        return 0
    return len(examples) * (len(find_blocks(empty_network(expert)).names) + 1)


def _sized(moments: InputMoments, size: int) -> InputMoments:
    """Without the constant where the layer has no bias."""
    return moments if len(moments.gram) == size else moments.without_constant()


def _per_input(weights: Sequence[float], moments: Sequence[InputMoments]) -> list[float]:
    """Weights of single inputs, so that every task counts alike, however many inputs it has."""
    return [w / max(one.count, 1) for w, one in zip(weights, moments, strict=True)]


def _record(plan: LayerPlan, found: LayerMerge) -> dict[str, Any]:
    return {
        "weight": plan.layer.weight,
        "rule": {
            key: value for key, value in dataclasses.asdict(plan.rule).items() if value is not None
        },
        "shape": [*found.correction.shape],
        "initial": found.initial,
        "value": found.value,
        "irreducible": found.floor,
        "captured": found.captured,
        "residual": found.residual,
        "heuristics": dict(found.heuristics),
        "contained": list(found.contained),
        "notes": list(found.notes),
    }
