"""Coefficients by the outputs of the whole network, for all that these depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.checkpoints import Checkpoint, atomic_write_text
from isthmus.engine.progress import Progress
from isthmus.engine.stage import REPORT, StageReport, Steps

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.models.listening import Batch
    from isthmus.models.parameter_groups import Grouping
    from isthmus.models.scaled_view import ScaledView
    from isthmus.projection.constraints import Constraint

RESULT = "network.json"


@dataclass(frozen=True)
class NetworkStage:
    """The programme in a few coefficients whose objective is the network's output.

    Attributes:
        donor: The base model.
        experts: The models that are merged.
        view: The merged model; `run` gives it the coefficients.
        examples: Of each expert.
        grouping: Which tensors share coefficients.
        constraint: On them.
        ridge: As a share of the mean diagonal entry of A.
        weights: ω_k.
        sweeps: Linearisations at most.
    """

    donor: Checkpoint
    experts: tuple[Checkpoint, ...]
    view: ScaledView
    examples: tuple[Sequence[Batch], ...] = field(repr=False)
    grouping: Grouping
    constraint: Constraint
    ridge: float
    weights: tuple[float, ...]
    sweeps: int

    @property
    def tensors(self) -> tuple[str, ...]:
        """All that the models have in common."""
        return tuple(self.view.names)

    @cached_property
    def digest(self) -> str:
        """Identifies the coefficients."""
        from isthmus.models.store import examples_hash

        examples = [examples_hash(one) for one in self.examples]
        content = [examples, self.grouping, repr(self.constraint), self.ridge, self.weights]
        return hashlib.sha256(json.dumps([*content, self.sweeps]).encode()).hexdigest()

    @property
    def peak_memory(self) -> int:
        """All models in float32, the merge, and one task vector."""
        size = sum(info.numel for info in self.donor.tensors.values())
        return 4 * (len(self.experts) + 3) * size

    @property
    def bytes_kept(self) -> int:
        """The coefficients as text."""
        return 2**12 + (200 + 30 * len(self.experts)) * len(self.tensors)

    def run(self, folder: Path, progress: Progress) -> StageReport:
        """Find the coefficients, unless the folder has them."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / RESULT
        found = _read(path)
        if found is None:
            found = self._found(progress)
            atomic_write_text(path, _text(found))
        self.view.coefficients = {
            name: tuple(values) for name, values in found["coefficients"].items()
        }
        return StageReport({REPORT: _text(found)}, tuple(_notes(found)))

    def multipliers(self, tensor: str) -> Tensor | None:
        """The coefficients of a tensor, shape [K, 1, 1]."""
        import torch

        found = self.view.coefficients.get(tensor)
        if found is None:
            return None
        return torch.tensor(found, dtype=torch.float64).reshape(-1, 1, 1)

    def _found(self, progress: Progress) -> dict[str, Any]:
        from isthmus.models.network_projection import project_network

        with Steps(progress, "projecting") as report:
            found = project_network(
                self.donor,
                self.experts,
                self.examples,
                basis=self.grouping,
                constraint=self.constraint,
                ridge=self.ridge,
                weights=self.weights,
                sweeps=self.sweeps,
                report=report,
            )
        return {
            "objective": "network",
            "captured": found.captured,
            "initial": found.initial,
            "value": found.values[-1],
            "values": list(found.values),
            "residual": found.residual,
            "converged": found.converged,
            "notes": list(found.notes),
            "coefficients": {name: d.tolist() for name, d in found.coefficients.items()},
        }


def _text(found: Mapping[str, Any]) -> str:
    return json.dumps(found, indent=1) + "\n"


def _read(path: Path) -> dict[str, Any] | None:
    """An earlier run's result; None if there is none, or it is spoilt."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found["coefficients"], dict) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _notes(found: Mapping[str, Any]) -> list[str]:
    told = (
        f"captured energy: {found['captured']:.1%} of the base's error in the network's outputs on the "
        f"calibration data; {REPORT} holds the coefficients"
    )
    return [told, *found["notes"]]
