"""After a merge: statistics and activations of the merged network, measured on data."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from isthmus.checkpoints import Checkpoint
from isthmus.checkpoints.dtypes import encode
from isthmus.engine.hashing import new_hash
from isthmus.engine.progress import Progress
from isthmus.errors import PlanError
from isthmus.recipes import Recipe
from isthmus.recipes.finish import Finish

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isthmus.checkpoints.layout import ShardLayout
    from isthmus.models.matched import Batch


_BATCH = 128
"""Pictures of a batch: BatchNorm measures every layer behind others that normalise by the batch."""


@dataclass(frozen=True)
class Finisher:
    """The last step of a merge.

    Attributes:
        finish: What to do.
        donor: Its configuration describes the network.
        experts: The models that were merged.
        share: Of the second of two models in their mean, for a repair without BatchNorm; None for statistics of
            BatchNorm.
        batches: Data.
    """

    finish: Finish
    donor: Checkpoint
    experts: tuple[Checkpoint, ...]
    share: float | None
    batches: Sequence[Batch] = field(repr=False)

    @cached_property
    def digest(self) -> str:
        """Identifies its result, for the same models."""
        from isthmus.models.store import examples_hash

        content = [self.finish.step, self.share, examples_hash(self.batches)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def run(self, staging: Path, layout: ShardLayout, progress: Progress) -> dict[str, str]:
        """Measure, and write what changes over what is in the files.

        Args:
            staging: The merged weight files, all of them written.
            layout: What is where in them.
            progress: Who listens.

        Returns:
            The new hash of every tensor that changed.

        Raises:
            PathError: A layer cannot be repaired, or a statistic is not finite.
            CalibrationError: Transformers cannot build the network.
        """
        from isthmus.geometry.linalg import one_thread
        from isthmus.models.network import Weights, empty_network

        network = empty_network(self.donor)
        stored = Weights(network, self.donor).stored
        known = [name for name in network.state_dict(keep_vars=True) if name in stored]
        progress.begin(f"finishing by {self.finish.step}", 1, counts=True)
        try:
            # Sums of another order have other last digits.
            with one_thread():
                merged = _tensors(staging, layout)
                before = {name: merged[stored[name]] for name in known}
                after = self._measured(network, before, {name: stored[name] for name in known})
            changed = {
                stored[name]: value for name, value in after.items() if value is not before[name]
            }
            hashes = dict(_written(changed, staging, layout))
            progress.advance(1)
            return hashes
        finally:
            progress.finish()

    def told(self, changed: Mapping[str, str]) -> str:
        """What was done, in a sentence."""
        count = sum(len(next(iter(batch.values()))) for batch in self.batches)
        return (
            f"finished by {self.finish.step}: {len(changed)} tensors were measured anew on {count} examples of "
            f"{self.finish.data}"
        )

    def _measured(
        self, network: nn.Module, merged: Mapping[str, Tensor], stored: Mapping[str, str]
    ) -> Mapping[str, Tensor]:
        from isthmus.models.batch_norm import repair, reset_statistics
        from isthmus.models.checkpoint_tensors import CheckpointTensors

        if self.share is None:
            return reset_statistics(network, merged, self.batches)
        a, b = (dict(CheckpointTensors(expert, stored).items()) for expert in self.experts)
        floats = {name: merged[name] for name in a}
        return {**merged, **repair(network, a, b, floats, self.share, self.batches)}


def plan_finish(
    recipe: Recipe, donor: Checkpoint, experts: Sequence[Checkpoint]
) -> Finisher | None:
    """The last step that a recipe asks for.

    Args:
        recipe: Says it.
        donor: Gives the configuration.
        experts: The models that are merged.

    Raises:
        PlanError: The network or the merge is none for that step.
        CalibrationError: The examples cannot be read, or do not fit the model, which Transformers must know.
    """
    finish = recipe.finish
    if finish is None:
        return None
    from isthmus.models.batch_norm import has_batch_norm
    from isthmus.models.batches import joined
    from isthmus.models.data import calibration_batches
    from isthmus.models.network import empty_network

    share = None
    if not has_batch_norm(empty_network(donor)):
        if finish.step == "reset":
            raise PlanError(
                f"finish by reset measures BatchNorm's running statistics, and {donor.label} has none",
                "Remove `finish:`; or take `step: repair`, for two models merged by linear.",
            )
        share = _share(recipe)
    batches = calibration_batches(
        donor,
        finish.calibration.path(recipe.root),
        column=finish.column,
        examples=finish.examples,
        tokens=finish.tokens,
        seed=finish.seed,
    )
    return Finisher(finish, donor, tuple(experts), share, joined(batches, _BATCH))


def _share(recipe: Recipe) -> float:
    """The share of the second of two models in their mean."""
    if recipe.merge_method == "linear" and len(recipe.experts) == 2:
        weights = [
            {**recipe.parameters, **entry.parameters}["weight"].plain() for entry in recipe.experts
        ]
        normalize = recipe.parameters.get("normalize")
        whole = normalize is None or normalize.plain()
        if all(isinstance(weight, int | float) and weight >= 0 for weight in weights) and (
            whole or math.isclose(sum(weights), 1)
        ):
            return float(weights[1] / sum(weights))
    raise PlanError(
        "finish by repair sets activations between those of two models, and this merge is no mean of two, with one "
        "weight each",
        "Merge two models by linear, weights not negative and the same for all tensors.",
    )


def _tensors(staging: Path, layout: ShardLayout) -> dict[str, Tensor]:
    """All that was merged, floating point in float32 at least."""
    import torch
    from safetensors import safe_open

    found: dict[str, Tensor] = {}
    for shard in layout.shards:
        with safe_open(staging / shard.file, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name)
                if tensor.is_floating_point():
                    tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
                found[name] = tensor
    return found


def _written(
    changed: Mapping[str, Tensor], staging: Path, layout: ShardLayout
) -> Iterator[tuple[str, str]]:
    for shard in layout.shards:
        own = [name for name in shard.tensors if name in changed]
        if not own:
            continue
        with (staging / shard.file).open("r+b") as file:
            for name in own:
                info = shard.tensors[name]
                values = np.ascontiguousarray(changed[name].numpy()).reshape(-1)
                content = encode(values, info.dtype).view(np.uint8)
                file.seek(shard.positions[name])
                file.write(content.data)
                digest = new_hash()
                digest.update(content.data)
                yield name, digest.hexdigest()
            file.flush()
