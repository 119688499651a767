"""The linear layers of a network, merged one by one on calibration data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus.checkpoints import Checkpoint
from isthmus.engine.progress import Progress
from isthmus.engine.remarks import some
from isthmus.engine.stage import REPORT, StageReport, Steps

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus.models.layer_merges import Examples, LayerPlan
    from isthmus.models.merged_view import MergedView


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
        activations: How activations wait between blocks: a value of `isthmus.models.states.Keep`.
    """

    donor: Checkpoint
    experts: tuple[Checkpoint, ...]
    plans: tuple[LayerPlan, ...]
    view: MergedView
    examples: tuple[Examples, ...] = field(repr=False)
    sequential: bool
    own_targets: bool
    for_adapters: bool = False
    activations: str = "float32"

    @property
    def tensors(self) -> tuple[str, ...]:
        """Weights and biases of the layers."""
        return tuple(name for plan in self.plans for name in plan.tensors)

    @cached_property
    def digest(self) -> str:
        """Identifies the layers."""
        from isthmus.models.store import StoredMoments, examples_hash

        examples = [
            asdict(one.key) if isinstance(one, StoredMoments) else examples_hash(one)
            for one in self.examples
        ]
        rules = [[plan.tensors, repr(plan.rule), plan.weights, plan.seeds] for plan in self.plans]
        precision = "bfloat16" if self.activations == "bfloat16" else "float32"
        content = [examples, rules, self.sequential, self.own_targets, precision]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @property
    def bytes_kept(self) -> int:
        """All layers in the precision of the merge, and a record of each."""
        infos = [(plan, self.donor.tensors[name]) for plan in self.plans for name in plan.tensors]
        weights = sum(info.numel * (8 if plan.wide else 4) for plan, info in infos)
        scales = 8 * len(self.experts) * sum(max(info.shape, default=1) for _, info in infos)
        return weights + (scales if self.for_adapters else 0) + 2**12 * len(self.plans)

    def run(self, folder: Path, progress: Progress) -> StageReport:
        """Merge the layers that are not in the folder yet."""
        from isthmus.models.layer_merges import LayerMerges
        from isthmus.models.solved import SolvedLayers
        from isthmus.models.states import Keep

        solved = SolvedLayers(folder, {plan.number: plan.tensors for plan in self.plans})
        self.view.solved = solved
        merges = LayerMerges(
            self.donor,
            self.experts,
            self.plans,
            solved,
            multipliers=self.for_adapters,
            keep=Keep(self.activations),
        )
        with Steps(progress, "merging layers") as report:
            if self.sequential:
                merges.in_sequence(
                    self.view,
                    self.examples,  # type: ignore[arg-type]  # planning refuses stored moments
                    report,
                    own_targets=self.own_targets,
                )
            else:
                merges.apart(self.examples, report)
        content = _content([*solved.records.values()])
        return StageReport({REPORT: json.dumps(content, indent=1) + "\n"}, tuple(_notes(content)))

    def multipliers(self, tensor: str) -> Tensor | None:
        """How the task vectors of a tensor are scaled."""
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


def _content(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The report as JSON has it."""
    judged = [layer for layer in layers if "initial" in layer]
    initial, value = (sum(layer[key] for layer in judged) for key in ("initial", "value"))
    return {
        "objective": "layer",
        "captured": 1 - value / initial if initial > 0 else 1.0,
        "initial": initial,
        "value": value,
        "irreducible": sum(layer["irreducible"] for layer in judged),
        "layers": {layer["weight"]: _without_name(layer) for layer in layers},
    }


def _notes(content: Mapping[str, Any]) -> Iterator[str]:
    judged = [layer for layer in content["layers"].values() if "initial" in layer]
    if content["initial"] > 0:
        yield (
            f"captured energy: {content['captured']:.1%} of the base's error on the calibration data, "
            f"over {len(judged)} linear layers; {REPORT} tells them apart"
        )
    by_text: dict[str, list[str]] = {}
    for name, layer in content["layers"].items():
        for note in layer["notes"]:
            subject, is_open, _ = note.partition(" does not determine ")
            text = f"{subject} leaves coefficients open" if is_open else note
            by_text.setdefault(text, []).append(name)
    yield from (f"{text}: {some(names)}" for text, names in sorted(by_text.items()))


def _without_name(layer: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in layer.items() if key != "weight"}
