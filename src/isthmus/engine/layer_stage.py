"""What methods that look at data do before tensors are written: the linear layers, one by one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.checkpoints import Checkpoint
from isthmus.engine.progress import Progress
from isthmus.engine.remarks import some

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.models.layer_merges import Examples, LayerPlan
    from isthmus.models.merged_view import MergedView

REPORT = "projection.json"
"""What was found out about every layer, in the output folder."""

FOLDER = "layers"
"""Where layers lie until the merge is finished, in the work folder."""


@dataclass(frozen=True)
class LayerStage:
    """The merge of a network's linear layers, which needs them in order and all in one process.

    Attributes:
        donor: The base model.
        experts: The models that are merged.
        plans: How each layer is merged, in the order of the network.
        view: The merged model; `run` says where its layers are.
        examples: What each expert is calibrated on.
        sequential: Whether inputs are computed anew with what is merged.
        own_targets: Then, whether targets come from the experts' own inputs.
        for_adapters: Whether the merge is to be written as an adapter, which needs `multipliers`.
    """

    donor: Checkpoint
    experts: tuple[Checkpoint, ...]
    plans: tuple[LayerPlan, ...]
    view: MergedView
    examples: tuple[Examples, ...] = field(repr=False)
    sequential: bool
    own_targets: bool
    for_adapters: bool = False

    @cached_property
    def digest(self) -> str:
        """Identifies the layers: same digest and same models, same numbers."""
        from isthmus.models.store import StoredMoments, examples_hash

        examples = [
            asdict(one.key) if isinstance(one, StoredMoments) else examples_hash(one)
            for one in self.examples
        ]
        rules = [[plan.tensors, repr(plan.rule), plan.weights, plan.seeds] for plan in self.plans]
        content = [examples, rules, self.sequential, self.own_targets]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def run(self, folder: Path, progress: Progress) -> StageReport:
        """Merge the layers that are not in the folder yet.

        Args:
            folder: Where they are kept, made if it is missing.
            progress: Who listens.

        Raises:
            CalibrationError: if a model cannot be run on its examples.
            MethodError: if a layer cannot be merged.
            NonFiniteError: if a weight holds NaN or infinity.
            OutputError: if the disk is full.
        """
        from isthmus.models.layer_merges import LayerMerges
        from isthmus.models.solved import SolvedLayers

        solved = SolvedLayers(folder, {plan.number: plan.tensors for plan in self.plans})
        self.view.solved = solved
        merges = LayerMerges(
            self.donor, self.experts, self.plans, solved, multipliers=self.for_adapters
        )
        with _Counted(progress) as report:
            if self.sequential:
                merges.in_sequence(
                    self.view,
                    self.examples,  # type: ignore[arg-type]  # planning refuses stored moments
                    report,
                    own_targets=self.own_targets,
                )
            else:
                merges.apart(self.examples, report)
        return StageReport(tuple(solved.records.values()))

    def multipliers(self, tensor: str) -> Tensor | None:
        """How the task vectors of a tensor are scaled; None where it is averaged.

        Returns:
            Of a shape that broadcasts to [K, m, n].
        """
        assert self.view.solved is not None
        return self.view.solved.multipliers(tensor)

    @property
    def peak_memory(self) -> int:
        """Bytes of matrices in memory while one layer is merged; activations come on top."""
        shapes = [self.donor.tensors[plan.layer.weight].shape for plan in self.plans]
        rows, columns = max(shapes, key=lambda shape: shape[0] * shape[1], default=(0, 0))
        widest = max((max(shape) for shape in shapes), default=0)
        count = len(self.experts)
        return 8 * ((3 * count + 4) * rows * columns + (3 * count + 4) * widest**2)


@dataclass(frozen=True, slots=True)
class StageReport:
    """What was found out about the layers.

    Attributes:
        layers: A record for each, in the order of the network.
    """

    layers: Sequence[Mapping[str, Any]]

    @property
    def texts(self) -> dict[str, str]:
        """The report as a file of the output; none without layers."""
        if not self.layers:
            return {}
        judged = [layer for layer in self.layers if "initial" in layer]
        initial, value = (sum(layer[key] for layer in judged) for key in ("initial", "value"))
        content = {
            "captured": 1 - value / initial if initial > 0 else 1.0,
            "initial": initial,
            "value": value,
            "irreducible": sum(layer["irreducible"] for layer in judged),
            "layers": {layer["weight"]: _without_name(layer) for layer in self.layers},
        }
        return {REPORT: json.dumps(content, indent=1) + "\n"}

    @property
    def notes(self) -> list[str]:
        """What the user should know."""
        judged = [layer for layer in self.layers if "initial" in layer]
        found = []
        initial = sum(layer["initial"] for layer in judged)
        if initial > 0:
            captured = 1 - sum(layer["value"] for layer in judged) / initial
            found.append(
                f"captured energy: {captured:.1%} of the base's error on the calibration data, over "
                f"{len(judged)} linear layers; {REPORT} tells them apart"
            )
        by_text: dict[str, list[str]] = {}
        for layer in self.layers:
            for note in layer["notes"]:
                kind = note.partition(" does not determine ")
                text = f"{kind[0]} leaves coefficients open" if kind[1] else note
                by_text.setdefault(text, []).append(str(layer["weight"]))
        found += [f"{text}: {some(names)}" for text, names in sorted(by_text.items())]
        return found


def _without_name(layer: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in layer.items() if key != "weight"}


class _Counted:
    """Tells a listener of steps, the number of which the first step tells."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._begun = False

    def __enter__(self) -> _Counted:
        return self

    def __exit__(self, *_: object) -> None:
        if self._begun:
            self._progress.finish()

    def __call__(self, _done: int, total: int) -> None:
        if not self._begun:
            self._progress.begin("merging layers", total, counts=True)
            self._begun = True
        self._progress.advance(1)
