"""Coefficients with which a whole network's outputs are nearest to the experts' (arXiv 2605.29101)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from isthmus.checkpoints import Checkpoint
from isthmus.errors import CalibrationError
from isthmus.models.calibration import Report
from isthmus.models.listening import Batch
from isthmus.models.network_body import NetworkBody, head_metric
from isthmus.models.network_descent import Descent, descend
from isthmus.models.output_objective import OutputObjective, Parameters, Task
from isthmus.models.parameter_groups import Grouping, parameter_groups
from isthmus.projection.constraints import FREE, Constraint
from isthmus.projection.solution import captured


@dataclass(frozen=True, eq=False)
class NetworkProjection:
    """A merge base + Σ_k d_k τ_k, and how near its outputs come to the experts'.

    Attributes:
        coefficients: d by tensor of the base's checkpoint, shape [K], float64. Tensors that the outputs do
            not depend on, such as task heads and poolers, are not in it.
        initial: J of the base.
        values: J at the start and after every sweep, measured by running the network; it never rises.
        captured: 1 − J/J of the base, for the last of them.
        converged: The residual is at most 1e-3.
        residual: How far the coefficients are from the optimality conditions (`projection.solution`), by
            the gradient of the measured J.
        notes: What calibration leaves open, and why the sweeps ended where they did not converge.
    """

    coefficients: Mapping[str, Tensor]
    initial: float
    values: tuple[float, ...]
    captured: float
    converged: bool
    residual: float
    notes: tuple[str, ...]


def project_network(
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    batches: Sequence[Sequence[Batch]],
    *,
    basis: Grouping = "scalar",
    constraint: Constraint = FREE,
    ridge: float = 0.0,
    weights: Sequence[float] | None = None,
    sweeps: int = 3,
    logits: bool = False,
    report: Report = lambda _done, _total: None,
) -> NetworkProjection:
    """Minimise J(d) = Σ_k ω_k/n_k Σ ‖f(θ(d)) − f(θ_k)‖² over the examples of each task k with n_k tokens.

    f gives the last hidden states at the tokens that are no padding. Task heads are left out, those of
    causal language models too unless `logits` is set. A sweep linearises the network at the current merge,
    solves the quadratic programme, and goes as far towards its solution as J, measured, falls. The start is
    the base or the weighted mean of the experts, whichever has the smaller J.

    Base, experts, the merge and one task vector are in memory in float32.

    Args:
        base: θ₀.
        experts: θ_k, of the same architecture; heads may differ.
        batches: The examples of each expert, at least one batch.
        basis: `scalar`: a coefficient for each expert; `blocks`: for each expert and block, what is defined
            before and after the blocks being blocks of their own; `modules`: for attention, MLP and the
            rest of each block apart. A sweep takes a Jacobian-vector product for each coefficient and batch.
        constraint: On the coefficients. A simplex goes with the basis `scalar` only.
        ridge: ρ of ρ‖d‖² as a share of the mean diagonal entry of A.
        weights: ω_k, not negative; all 1 if not given.
        sweeps: At most so many.
        logits: Compare what the base's head, that of a causal language model, makes of the hidden states.
        report: Is told how many products are done, and of how many at most.

    Raises:
        CalibrationError: if a model cannot be run on its examples, the models differ in architecture, there
            is too little memory, or examples, weights, sweeps or the simplex make no sense.
        CheckpointError: if a model cannot be read.
        MethodError: a negative ridge.
        NonFiniteError: if a model holds NaN or infinity.
    """
    shares = [1.0] * len(experts) if weights is None else [float(weight) for weight in weights]
    _require_sense(experts, batches, shares, sweeps)
    body = NetworkBody.of(base)
    copies = len(experts) + 3
    _require_memory(copies * body.size, f"{copies} copies of {body.label} in float32")
    if logits:
        body = dataclasses.replace(body, metric=head_metric(body))
    origin = body.parameters()
    names = body.reached(origin, [own[0] for own in batches])
    groups = parameter_groups(body.body, names, basis)
    if constraint.total is not None and len(groups) > 1:
        raise CalibrationError(
            f"a simplex does not go with the basis {basis}, whose coefficients of all groups would sum "
            f"to {constraint.total:g}",
            "Take a box, or the basis scalar.",
        )
    parameters: list[Parameters] = []
    tasks: list[Task] = []
    for checkpoint, own, share in zip(experts, batches, shares, strict=True):
        expert = dataclasses.replace(NetworkBody.of(checkpoint), metric=body.metric)
        whole = _parameters(expert, {name: origin[name] for name in names})
        tasks.append(_task(expert, whole, own, share))
        parameters.append({name: whole[name] for name in names})
    objective = OutputObjective(body.outputs, origin, parameters, list(groups.values()), tasks)
    products = math.prod(objective.shape)
    rows = max(target.numel() for task in tasks for target in task.targets)
    _require_memory((products + 1) * rows, f"{products} derivatives of the outputs on one batch")

    initial = objective.value(torch.zeros(products, dtype=torch.float64))
    if not math.isfinite(initial):
        raise CalibrationError(
            f"{body.label} gives NaN or infinity on the calibration examples",
            "Leave out the examples that bring it.",
        )
    done, total = 0, sweeps * products * sum(map(len, batches))

    def step() -> None:
        nonlocal done
        done += 1
        report(done, total)

    found = descend(
        objective,
        _starts(objective, shares, constraint),
        constraint,
        ridge=ridge,
        sweeps=sweeps,
        step=step,
    )
    by_group = found.coefficients.view(objective.shape)
    return NetworkProjection(
        coefficients={
            body.tensor(name): d.clone()
            for d, group in zip(by_group, groups.values(), strict=True)
            for name in group
        },
        initial=initial,
        values=found.values,
        captured=captured(found.values[-1], initial),
        converged=found.converged,
        residual=found.residual,
        notes=(*_left_open(objective, found, [one.label for one in experts]), *found.notes),
    )


def _require_sense(
    experts: Sequence[Checkpoint],
    batches: Sequence[Sequence[Batch]],
    shares: Sequence[float],
    sweeps: int,
) -> None:
    if not experts or len(experts) != len(batches) or not all(batches):
        raise CalibrationError(
            "there are not examples for every expert", "Give each at least one batch of its own."
        )
    sensible = all(0 <= share < math.inf for share in shares) and sum(shares) > 0
    if len(shares) != len(experts) or not sensible:
        raise CalibrationError(
            f"the weights {list(shares)} do not weigh {len(experts)} experts",
            "Give each a weight of at least 0, and not all 0.",
        )
    if sweeps < 1:
        raise CalibrationError(f"{sweeps} sweeps", "Give at least 1.")


def _require_memory(numbers: int, what: str) -> None:
    needed, available = 4 * numbers, _available_memory()
    if available is not None and needed > available:
        raise CalibrationError(
            f"{what} take {needed / 2**30:.1f} GiB; {available / 2**30:.1f} GiB of memory are available",
            "Project layer by layer, which holds one block at a time, or take shorter examples.",
        )


def _available_memory() -> int | None:
    """Bytes that programmes can still have; None where the system does not say so, as outside Linux."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kilobytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024 * kilobytes[0] if kilobytes else None


def _parameters(expert: NetworkBody, origin: Parameters) -> dict[str, Tensor]:
    """An expert's parameters, among them those of the base."""
    found = expert.parameters()
    for name, value in origin.items():
        own = found.get(name)
        if own is None or own.shape != value.shape:
            has = "no" if own is None else f"shape {list(own.shape)} for"
            raise CalibrationError(
                f"{expert.label} has {has} {name}, which has shape {list(value.shape)} in the base",
                "Merge models of one architecture.",
            )
    return found


@torch.no_grad()
def _task(
    expert: NetworkBody, parameters: Parameters, batches: Sequence[Batch], share: float
) -> Task:
    targets = []
    for batch in batches:
        target = expert.outputs(parameters, batch)
        if not torch.isfinite(target).all():
            raise CalibrationError(
                f"{expert.label} gives NaN or infinity on its calibration examples",
                "Leave out the examples that bring it.",
            )
        targets.append(target)
    tokens = sum(len(target) for target in targets)
    return Task(batches, targets, share / max(tokens, 1))


def _starts(
    objective: OutputObjective, shares: Sequence[float], constraint: Constraint
) -> list[Tensor]:
    """The base and the mean of the experts, or what is nearest to them under the constraint."""
    mean = torch.tensor(shares, dtype=torch.float64).repeat(objective.shape[0]) / sum(shares)
    # What moves nothing is not settled by any step: it starts, and stays, at the least norm.
    mean = torch.where(objective.moving, mean, 0.0)
    return list(constraint.project(torch.stack([torch.zeros_like(mean), mean])))


def _left_open(objective: OutputObjective, found: Descent, labels: Sequence[str]) -> list[str]:
    moving = objective.moving.view(objective.shape)
    open_ones = found.undetermined.view(objective.shape) & moving
    notes = [
        f"{label} equals the base where the outputs depend on it; its coefficients mean nothing"
        for k, label in enumerate(labels)
        if not moving[:, k].any()
    ]
    those = [label for k, label in enumerate(labels) if open_ones[:, k].any()]
    if those:
        notes.append(
            f"the calibration does not determine the coefficients of {', '.join(those)}; the "
            "least-norm answer is taken"
        )
    return notes
