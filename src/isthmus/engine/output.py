"""Whether a merge may be written to a folder; looked at before anything is."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from isthmus.checkpoints import Source
from isthmus.engine.manifest import MANIFEST, WORK, SourceRecord, read_manifest
from isthmus.engine.plan import Plan
from isthmus.engine.verify import verify
from isthmus.engine.workspace import STAGING, is_finished, require_ours
from isthmus.errors import OutputError, PlanError


def check_output(plan: Plan, out: Path, *, version: str, resume: bool, overwrite: bool) -> None:
    """Refuse what cannot or should not be written.

    Args:
        plan: The merge.
        out: The output folder.
        version: Of Isthmus.
        resume: Whether to go on with an interrupted merge. A finished one must be this very
            merge, and whole.
        overwrite: Whether to replace an earlier merge.

    Raises:
        PlanError: if the folder holds an input, or the disk is too small.
        OutputError: if it holds what is not ours, or another merge.
    """
    if resume and overwrite:
        raise PlanError("resume and overwrite exclude each other", "Choose one of them.")
    require_apart(out, plan.models)
    require_ours(out, allowed=resume or overwrite)
    if resume and is_finished(out):
        _require_same(plan, out, version)
        return
    _require_room(plan, out)


def source_records(plan: Plan) -> list[SourceRecord]:
    """What went in, for the manifest."""
    return [
        SourceRecord(
            model=model.label, files={source.path.name: source.size for source in model.sources}
        )
        for model in plan.models
    ]


def require_apart(out: Path, models: Sequence[Source]) -> None:
    """Refuse to write over what is read.

    Raises:
        PlanError: if the output folder holds a file of one of the models.
    """
    target = out.resolve()
    for model in models:
        for source in model.sources:
            if source.path.resolve().is_relative_to(target):
                raise PlanError(
                    f"the output folder {out} holds the input {source.path.name} of {model.label}",
                    "Choose another output folder.",
                )


def require_room(out: Path, needed: int, work: str, cure: str) -> None:
    """Refuse to begin what cannot be finished.

    Args:
        out: Where it is written; the folder need not exist.
        needed: Bytes.
        work: What writes them, such as `the merge`.
        cure: What to do about a disk that is too small.

    Raises:
        PlanError: if the disk has less.
    """
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise PlanError(
            f"{work} writes {needed:,} bytes and the disk of {out} has {free:,} left", cure
        )


def _require_same(plan: Plan, out: Path, version: str) -> None:
    """The finished merge in `out` is the one that the plan describes, and nothing is damaged."""
    manifest = read_manifest(out)
    weights = [name for name, record in manifest.files.items() if record.tensors is not None]
    found = (manifest.isthmus, manifest.recipe, manifest.sources, sorted(weights))
    asked = (
        version,
        plan.recipe.to_yaml(),
        source_records(plan),
        sorted(shard.file for shard in plan.layout.shards),
    )
    finished_ns = (out / MANIFEST).stat().st_mtime_ns
    newer = any(s.modified_ns > finished_ns for model in plan.models for s in model.sources)
    if found != asked or newer:
        raise OutputError(
            f"{out} holds a finished merge of another recipe, other inputs or other options",
            "Pass --overwrite instead of --resume to replace it, or choose another folder.",
        )
    problems = verify(out).problems
    if problems:
        raise OutputError(
            f"{out} holds this merge, finished and then damaged: {'; '.join(problems[:3])}",
            "Pass --overwrite instead of --resume to make it anew.",
        )


def _require_room(plan: Plan, out: Path) -> None:
    staged = out / WORK / STAGING
    files = [file for file in staged.iterdir() if file.is_file()] if staged.is_dir() else []
    needed = plan.bytes_to_write + plan.small_files - sum(f.stat().st_blocks * 512 for f in files)
    require_room(out, needed, "the merge", "Free some space, or write to another disk.")
