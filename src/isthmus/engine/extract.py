"""Extracting a LoRA adapter from a full fine-tune."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import yaml
from threadpoolctl import threadpool_limits

from isthmus.checkpoints import Dtype, atomic_write_text, open_checkpoint
from isthmus.checkpoints.adapter import ADAPTER_CONFIG
from isthmus.checkpoints.dtypes import RECIPE_DTYPES
from isthmus.engine.extract_plan import ExtractionPlan, plan_extraction
from isthmus.engine.extract_work import Extractor
from isthmus.engine.extraction import Extraction, Ranks
from isthmus.engine.hashing import hash_range
from isthmus.engine.manifest import MANIFEST, WORK, FileRecord, Manifest, SourceRecord
from isthmus.engine.output import require_apart, require_room
from isthmus.engine.progress import Progress, Silent
from isthmus.engine.workspace import (
    Workspace,
    complete_commit,
    is_committing,
    open_workspace,
    require_ours,
)
from isthmus.errors import OutputError, PlanError


def extract(
    tuned: str,
    base: str,
    out: Path,
    *,
    ranks: Ranks,
    version: str,
    card: Callable[[Extraction, str], str],
    modules: str | None = None,
    save: str | None = None,
    dtype: str = "float32",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Extraction:
    """Write the difference of two models as a LoRA adapter.

    The update of a module is the truncated singular value decomposition of its change, computed in
    float64 with one module in memory. The output is complete or absent.

    Args:
        tuned: The fine-tune, as in a recipe.
        base: The model that it was trained from.
        out: The output folder; nothing that Isthmus did not write is ever replaced.
        ranks: How ranks are chosen.
        version: Of Isthmus, for the manifest.
        card: Writes the model card from the outcome and the settings as YAML.
        modules: A regular expression to be found in the names of the modules for LoRA; None for all
            linear layers but the output embedding.
        save: A regular expression to be found in the names of other tensors; their modules are
            stored in full.
        dtype: The format of the factors.
        overwrite: Replace an earlier output.
        progress: Who listens.

    Raises:
        CheckpointError: if a model cannot be opened or read.
        PlanError: if the two do not correspond, nothing changed, or the disk is too small.
        OutputError: if the folder cannot be used.
        NonFiniteError: if an input holds NaN or infinity, or a factor overflows.
    """
    out = out.absolute()
    stored = RECIPE_DTYPES.get(dtype)
    if stored is None or stored.itemsize < 2:
        raise PlanError(f"{dtype} is no format for factors", "Use float32, bfloat16 or float16.")
    if overwrite:
        complete_commit(out)
    _require_free(out, overwrite)
    with ExitStack() as stack:
        fine = stack.enter_context(open_checkpoint(tuned))
        origin = stack.enter_context(open_checkpoint(base))
        require_apart(out, (fine, origin))
        settings = {
            "extract": tuned,
            "base_model": base,
            "rank": ranks.rank,
            "energy": ranks.energy,
            "min_rank": None if ranks.energy is None else ranks.least,
            "max_rank": ranks.most,
            "modules": modules,
            "save": save,
            "dtype": stored.torch_name,
        }
        text = yaml.safe_dump(
            {key: value for key, value in settings.items() if value is not None},
            sort_keys=False,
            allow_unicode=True,
        )
        plan = plan_extraction(fine, origin, modules, save)
        require_room(
            out,
            _bytes_to_write(plan, ranks, stored),
            "the extraction",
            "Free some space, write to another disk, or ask for less: --rank, --modules, --dtype.",
        )
        digest = hashlib.sha256(text.encode()).hexdigest()
        space = stack.enter_context(_space(out, digest, overwrite))
        extractor = Extractor(fine, origin, plan, ranks, stored, space, progress or Silent())
        # As in a merge: results do not depend on the number of processors.
        with threadpool_limits(limits=1):
            extraction, files = extractor.run()
        atomic_write_text(space.staging / "README.md", card(extraction, text))
        for name in ("README.md", ADAPTER_CONFIG):
            path = space.staging / name
            size = path.stat().st_size
            files[name] = FileRecord(size=size, xxh3=hash_range(path, 0, size))
        manifest = Manifest(
            isthmus=version,
            recipe=text,
            sources=[
                SourceRecord(model=m.label, files={s.path.name: s.size for s in m.sources})
                for m in (fine, origin)
            ],
            notes=list(extraction.notes),
            files=files,
        )
        atomic_write_text(space.staging / MANIFEST, manifest.to_json())
        space.commit(list(files))
        return extraction


@contextmanager
def _space(out: Path, digest: str, overwrite: bool) -> Iterator[Workspace]:
    """The folder to write in; after a failure nothing of ours is left there."""
    new = not out.exists()
    with open_workspace(out, digest, resume=False, overwrite=overwrite) as space:
        try:
            yield space
        except BaseException:
            # A commit that has begun is finished by the next run instead.
            if not is_committing(out):
                shutil.rmtree(space.work, ignore_errors=True)
                if new:
                    with suppress(OSError):
                        out.rmdir()
            raise


def _bytes_to_write(plan: ExtractionPlan, ranks: Ranks, dtype: Dtype) -> int:
    """What the disk must hold at once: the finished factors, the adapter, what is stored in full."""
    factors = sum(
        ranks.expected(min(rows, columns)) * (rows + columns) * dtype.itemsize
        for rows, columns in (target.shape for target in plan.targets)
    )
    full = sum(rest.tuned.info.nbytes for rest in plan.rest if rest.module in plan.saved)
    return 2 * factors + full


def _require_free(out: Path, overwrite: bool) -> None:
    if (out / WORK).exists() and not overwrite:
        raise OutputError(
            f"{out} holds an output that is being written or was interrupted",
            "Wait for it, or pass --overwrite to start anew.",
        )
    require_ours(out, allowed=overwrite)
