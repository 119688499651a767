"""The work of an extraction: one module's change after the other, then the adapter's files."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.checkpoints import (
    Checkpoint,
    Dtype,
    ShardLayout,
    ShardWriter,
    TensorInfo,
    atomic_write_text,
)
from isthmus.checkpoints.adapter import ADAPTER_CONFIG
from isthmus.checkpoints.adapter_format import ModuleUpdate, adapter_config, adapter_tensors
from isthmus.checkpoints.dtypes import encode
from isthmus.checkpoints.loaded_model import Kind
from isthmus.checkpoints.safetensors_file import SafetensorsFile
from isthmus.engine.extract_plan import ExtractionPlan, Rest, Target
from isthmus.engine.extraction import ExtractedModule, Extraction, Ranks, TensorChange
from isthmus.engine.hashing import new_hash
from isthmus.engine.manifest import FileRecord
from isthmus.engine.progress import Progress
from isthmus.engine.streams import Operand, require_finite
from isthmus.engine.workspace import Workspace
from isthmus.errors import NonFiniteError, PlanError
from isthmus.geometry.truncation import Truncation

CHUNK = 1 << 20
"""Elements read at once."""

_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
"""Tasks by the ends of architectures' names. For others PEFT would expect a head of its choice."""


class Extractor:
    """Computes the parts of an adapter and writes its weights and configuration.

    Args:
        tuned: The fine-tune.
        base: The model that it was trained from.
        plan: What goes where.
        ranks: How ranks are chosen.
        dtype: The format of the factors.
        space: Where to write.
        progress: Who listens.
    """

    def __init__(
        self,
        tuned: Checkpoint,
        base: Checkpoint,
        plan: ExtractionPlan,
        ranks: Ranks,
        dtype: Dtype,
        space: Workspace,
        progress: Progress,
    ) -> None:
        self._tuned = tuned
        self._base = base
        self._plan = plan
        self._ranks = ranks
        self._dtype = dtype
        self._space = space
        self._progress = progress

    def run(self) -> tuple[Extraction, dict[str, FileRecord]]:
        """Compute and write.

        Returns:
            The outcome, and the record of the weight file for the manifest.

        Raises:
            PlanError: if no module for LoRA changed.
            NonFiniteError: if an input holds NaN or infinity, or a factor overflows.
        """
        plan = self._plan
        sizes = [target.tuned.info.nbytes for target in plan.targets]
        sizes += [rest.tuned.info.nbytes for rest in plan.rest]
        self._progress.begin("extracting", sum(sizes))
        try:
            changes = [change for rest in plan.rest if (change := self._change(rest))]
            modules = [
                module
                for number, target in enumerate(plan.targets)
                if (module := self._module(target, self._part(number)))
            ]
        finally:
            self._progress.finish()
        if not modules:
            raise PlanError(
                f"no module for LoRA differs between {self._tuned.label} and {self._base.label}",
                "See that the two are what they should be: isthmus inspect BASE TUNED.",
            )
        saved = self._saved(changes, {module.module for module in modules})
        files = self._write(modules, saved)
        held = {change.name for change in changes} & saved.keys()
        left_out = tuple(change for change in changes if change.name not in held)
        extraction = Extraction(
            out=self._space.out,
            modules=tuple(modules),
            saved=tuple(change for change in changes if change.name in held),
            left_out=left_out,
            unchanged=len(sizes) - len(modules) - len(changes),
            notes=(*plan.notes, *_notes(left_out)),
        )
        return extraction, files

    def _part(self, number: int) -> Path:
        """Where a module's factors wait until the size of all of them is known."""
        return self._space.work / f"module-{number:05d}"

    def _change(self, rest: Rest) -> TensorChange | None:
        """How much a tensor changed; None if it did not."""
        difference = origin = 0.0
        for start in range(0, rest.tuned.info.numel, CHUNK):
            count = min(CHUNK, rest.tuned.info.numel - start)
            values = _read(rest.tuned, start, count)
            if rest.base is not None:
                others = _read(rest.base, start, count)
                values -= others
                origin += float(np.vdot(others, others))
            difference += float(np.vdot(values, values))
        self._progress.advance(rest.tuned.info.nbytes)
        if rest.base is None:
            return TensorChange(rest.name, difference, None)
        if not difference:
            return None
        return TensorChange(rest.name, difference, _ratio(difference, origin))

    def _module(self, target: Target, path: Path) -> ExtractedModule | None:
        """Truncate a module's change and put the factors aside; None if it did not change."""
        weight = _read(target.tuned, 0, target.tuned.info.numel)
        origin = 0.0
        for start in range(0, weight.size, CHUNK):
            others = _read(target.base, start, min(CHUNK, weight.size - start))
            weight[start : start + others.size] -= others
            origin += float(np.vdot(others, others))
        self._progress.advance(target.tuned.info.nbytes)
        matrix = weight.reshape(target.shape)
        if target.transposed:
            matrix = matrix.T
        energy = float(np.vdot(weight, weight))
        if not energy:
            return None
        found = self._ranks.apply(matrix)
        self._put_aside(path, target.module, found)
        rows, columns = matrix.shape
        return ExtractedModule(
            module=target.module,
            shape=(rows, columns),
            rank=found.rank,
            kept=found.kept,
            energy=energy,
            change=_ratio(energy, origin),
        )

    def _put_aside(self, path: Path, module: str, found: Truncation) -> None:
        factors = {"A": encode(found.right, self._dtype), "B": encode(found.left, self._dtype)}
        for factor in factors.values():
            if not np.isfinite(factor.astype(np.float64)).all():
                raise NonFiniteError(
                    f"the factors of {module} overflow {self._dtype.torch_name}",
                    "Write them in bfloat16 or float32: --dtype.",
                )
        infos = [TensorInfo(name, self._dtype, f.shape) for name, f in factors.items()]
        (shard,) = ShardLayout.plan(infos, sys.maxsize).shards
        with ShardWriter(path, shard) as writer:
            for name, factor in factors.items():
                writer.write(name, 0, factor)

    def _saved(self, changes: Sequence[TensorChange], adapted: set[str]) -> Mapping[str, Operand]:
        """The tensors to store in full: those of saved modules in which any changed."""
        changed = {change.name.rpartition(".")[0] for change in changes}
        chosen = changed & self._plan.saved
        rest = {r.name for r in self._plan.rest}
        names, tied = self._plan.names, self._plan.tied
        # PEFT stores both ends of a tie, or the other one would stay as it was.
        return {
            name: Operand(self._tuned, tied.get(stored, stored))
            for stored, name in names.items()
            # The weight of a module with LoRA is no part of what is saved; its bias is.
            if (module := names.get(tied.get(stored, stored), "").rpartition(".")[0]) in chosen
            and (module not in adapted or name in rest)
        }

    def _write(
        self, modules: Sequence[ExtractedModule], saved: Mapping[str, Operand]
    ) -> dict[str, FileRecord]:
        """Write the weights and the configuration."""
        places = {target.module: number for number, target in enumerate(self._plan.targets)}
        updates = [self._update(self._plan.targets[places[m.module]], m) for m in modules]
        stored = adapter_tensors(
            updates,
            [TensorInfo(name, o.info.dtype, o.info.shape) for name, o in saved.items()],
            self._dtype,
        )
        adapted = {update.module for update in updates}
        whole = dict.fromkeys(name.rpartition(".")[0] for name in saved)
        text = adapter_config(
            self._donor(),
            updates,
            [module for module in whole if module not in adapted],
        )
        atomic_write_text(self._space.staging / ADAPTER_CONFIG, text)
        factors = [stored.of_module(update) for update in updates]
        infos = [info for f in factors for info in (f.a, f.b)] + [*stored.replaced.values()]
        (shard,) = ShardLayout.plan(infos, sys.maxsize, stem="adapter_model").shards
        digests: dict[str, str] = {}
        with ShardWriter(self._space.staging / shard.file, shard) as writer:
            for update, pair in zip(updates, factors, strict=True):
                part = self._part(places[update.module])
                file = SafetensorsFile(part)
                for name, info in (("A", pair.a), ("B", pair.b)):
                    values = file.read_stored(name, 0, info.numel)
                    writer.write(info.name, 0, values)
                    digests[info.name] = new_hash(values.view(np.uint8).data).hexdigest()
                file.close()
                part.unlink()
            for name, operand in saved.items():
                info = stored.replaced[name]
                digest = new_hash()
                for start in range(0, info.numel, CHUNK):
                    stop = min(start + CHUNK, info.numel)
                    values = operand.model.read_stored(operand.name, start, stop)
                    writer.write(info.name, start, values)
                    digest.update(values.view(np.uint8).data)
                digests[info.name] = digest.hexdigest()
            writer.sync()
        record = FileRecord(
            size=shard.size,
            xxh3=new_hash(shard.header).hexdigest(),
            tensors={name: digests[name] for name in shard.tensors},
        )
        return {shard.file: record}

    def _update(self, target: Target, module: ExtractedModule) -> ModuleUpdate:
        return ModuleUpdate(
            module=module.module,
            rank=module.rank,
            shape=module.shape,
            kernel=target.kernel,
            embedding=target.embedding,
        )

    def _donor(self) -> dict[str, Any]:
        """What the adapter's configuration says about its base and its task."""
        names = (self._tuned.config or {}).get("architectures") or [""]
        tasks = [task for end, task in _TASKS.items() if str(names[0]).endswith(end)]
        return {
            "base_model_name_or_path": self._base.label,
            "fan_in_fan_out": any(t.kind is Kind.CONV1D for t in self._plan.targets),
            "task_type": tasks[0] if tasks else None,
        }


def _read(operand: Operand, start: int, count: int) -> NDArray[np.float64]:
    values = np.empty(count, np.float64)
    operand.model.read(operand.name, start, values)
    try:
        require_finite(values, operand, start)
    except NonFiniteError as error:
        raise NonFiniteError(
            error.problem, "The model is probably broken: its training diverged, most likely."
        ) from error
    return values


def _ratio(difference: float, origin: float) -> float:
    """The ratio of two norms, given their squares; infinite where something came from nothing."""
    return math.sqrt(difference / origin) if origin else math.inf


def _notes(left_out: Sequence[TensorChange]) -> Iterator[str]:
    changed = [t for t in left_out if t.change is not None]
    new = [t.name for t in left_out if t.change is None]
    if changed:
        most = max(changed, key=lambda t: t.change or 0.0)
        yield (
            f"{len(changed)} changed tensors are not in the adapter, for no LoRA was made of them; "
            f"{most.name} changed most, by {most.change:.2%} of its norm. --save REGEX stores their "
            "modules in full."
        )
    if new:
        shown = ", ".join(new[:4]) + (f" and {len(new) - 4} more" if len(new) > 4 else "")
        yield (
            f"the base lacks {shown}, or has it in another shape, and the adapter leaves it out; "
            "--save REGEX stores it."
        )
