"""The Python interface: merge files, plan a merge, extract an adapter."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from isthmus.checkpoints import atomic_write_text
from isthmus.engine import extract as extraction
from isthmus.engine import output
from isthmus.engine.extraction import Extraction, Ranks
from isthmus.engine.plan import DEFAULT_SHARD_SIZE, Plan
from isthmus.engine.planned import planned
from isthmus.engine.progress import Progress
from isthmus.engine.run import Outcome, run
from isthmus.recipes import Recipe, load_recipe
from isthmus.reports.adapter_card import adapter_card
from isthmus.reports.card import model_card

if TYPE_CHECKING:
    from isthmus.models.connection import Connection

RecipeLike: TypeAlias = Recipe | Mapping[str, Any] | str | Path
"""A recipe, a mapping with its keys, the path of its file, or YAML text."""


@contextmanager
def plan(
    recipe: RecipeLike,
    *,
    device: str = "cpu",
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    allow_nonfinite: bool = False,
) -> Iterator[Plan]:
    """Plan a merge without writing anything; the models stay open inside the `with` block.

    Args:
        recipe: What to merge.
        device: `cpu`, or a torch device such as `cuda`.
        max_shard_size: Bytes of the largest weight file, or text such as `5GB`.
        allow_nonfinite: Let NaN and infinity pass.

    Raises:
        RecipeError: if the recipe is malformed.
        CheckpointError: if a model cannot be opened.
        PlanError: if the models cannot be merged as asked.

    Example:
        >>> with isthmus.plan("merge.yaml") as plan:  # doctest: +SKIP
        ...     print(plan.bytes_to_write)
    """
    with planned(
        _recipe(recipe),
        device=device,
        max_shard_size=max_shard_size,
        allow_nonfinite=allow_nonfinite,
    ) as made:
        yield made


def merge(
    recipe: RecipeLike,
    out: str | PathLike[str],
    *,
    device: str = "cpu",
    workers: int | None = None,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    resume: bool = False,
    overwrite: bool = False,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Merge models into a folder that transformers loads.

    Memory stays at a few chunks whatever the size of the models. The output is complete or
    absent; an interrupted merge goes on with `resume` and ends in the same bytes.

    Args:
        recipe: What to merge.
        out: The output folder; nothing that Isthmus did not write is ever replaced.
        device: `cpu`, or a torch device such as `cuda`.
        workers: Threads; by default one a processor.
        max_shard_size: Bytes of the largest weight file, or text such as `5GB`.
        resume: Go on with an interrupted merge.
        overwrite: Replace an earlier merge.
        allow_nonfinite: Let NaN and infinity pass.
        progress: Is told how far the merge is; see `isthmus.engine.progress.Progress`.

    Raises:
        RecipeError: if the recipe is malformed.
        CheckpointError: if a model cannot be opened or read.
        PlanError: if the models cannot be merged as asked.
        OutputError: if the folder cannot be used.
        NonFiniteError: if an input holds NaN or infinity and may not.
    """
    with plan(
        recipe, device=device, max_shard_size=max_shard_size, allow_nonfinite=allow_nonfinite
    ) as made:
        return run_plan(
            made, out, workers=workers, resume=resume, overwrite=overwrite, progress=progress
        )


def run_plan(
    made: Plan,
    out: str | PathLike[str],
    *,
    workers: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Carry out a plan; see `merge`."""
    target = Path(out)
    return run(
        made,
        target,
        version=version("isthmus"),
        card=lambda done: _card(done, target),
        workers=workers,
        resume=resume,
        overwrite=overwrite,
        progress=progress,
    )


def align(
    reference: str | PathLike[str],
    moved: str | PathLike[str],
    out: str | PathLike[str],
    *,
    by: str = "weights",
    data: str | PathLike[str] | None = None,
    column: str | None = None,
    examples: int = 64,
    tokens: int = 128,
    steps: int = 100,
    axes: Sequence[str] | None = None,
    residual: str = "auto",
    seed: int = 0,
    dtype: str | None = None,
    workers: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Write a model moved along its symmetries next to another one; it computes the same.

    See `isthmus.symmetry.matching.match_weights`, `isthmus.symmetry.activation_matching` and
    `isthmus.symmetry.learned`. It is a merge of one model, with the key `align` in its recipe.

    Args:
        reference: The model that stays.
        moved: The one that moves.
        out: The output folder; nothing that Isthmus did not write is ever replaced.
        by: What is matched: weights, activations or learned.
        data: Examples for activations and learned.
        column: The column of the texts.
        examples: How many to choose.
        tokens: Longer texts are cut after so many.
        steps: Of learned.
        axes: Names or patterns of the axes to match; None for all.
        residual: The group of the residual stream: auto, none, permutation or signed.
        seed: Decides the order in which axes are visited.
        dtype: The number format of the output; that of `moved` if None.
        workers: Threads that write; by default one a processor.
        resume: Go on with an interrupted alignment.
        overwrite: Replace an earlier output.
        progress: Is told how far it is.

    Raises:
        RecipeError: An unknown residual group or number format, or data that is missing or not needed.
        CheckpointError: A model cannot be opened or read.
        CalibrationError: The examples cannot be read.
        SymmetryError: The models do not fit, there is no such axis, or the function would change.
        OutputError: The folder cannot be used.
    """
    recipe = {
        "merge_method": "passthrough",
        "models": [{"model": str(moved)}],
        "align": {
            "to": str(reference),
            "by": by,
            "residual": residual,
            "seed": seed,
            "axes": None if axes is None else list(axes),
            **(
                {}
                if by == "weights" and data is None
                else {
                    "data": None if data is None else str(data),
                    "column": column,
                    "examples": examples,
                    "tokens": tokens,
                    "steps": steps,
                }
            ),
        },
        **({} if dtype is None else {"dtype": dtype}),
    }
    return merge(
        recipe, out, workers=workers, resume=resume, overwrite=overwrite, progress=progress
    )


def connect(
    a: str | PathLike[str],
    b: str | PathLike[str],
    data: str | PathLike[str],
    out: str | PathLike[str],
    *,
    column: str | None = None,
    examples: int = 256,
    tokens: int = 128,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    **settings: Any,
) -> Connection:
    """Align two causal language models, join them by a path, and evaluate it; write a report.

    Args:
        a: The model that stays.
        b: The other one, of the same architecture.
        data: Texts, as `isthmus calibrate` takes them; every other one is held out.
        out: Folder for results.json and report.html.
        column: The column of the texts.
        examples: How many texts to choose.
        tokens: Longer texts are cut after so many.
        resume: Go on with a training of bends that was interrupted.
        overwrite: Replace an earlier report.
        progress: Is told how far it is.
        settings: See `isthmus.models.connection.ConnectSettings`.

    Raises:
        SymmetryError: The models differ in architecture, or their symmetries are not known.
        PathError: A loss is not finite, or there is no data, no bend, no causal language model.
        CalibrationError: The data or a network cannot be used.
        OutputError: The folder holds something else.
    """
    from isthmus.engine.connect import connect as run_connect

    return run_connect(
        str(a),
        str(b),
        Path(data),
        Path(out),
        settings,
        column=column,
        examples=examples,
        tokens=tokens,
        resume=resume,
        overwrite=overwrite,
        progress=progress,
        write=_connection_report,
    )


def _connection_report(found: Connection, a: str, b: str, out: Path) -> None:
    from isthmus.reports.connection import connection_data, write_connection_report

    write_connection_report(found, a, b, out / "report.html")
    text = json.dumps(connection_data(found, a, b), indent=1, ensure_ascii=False)
    atomic_write_text(out / "results.json", text + "\n")


def extract(
    tuned: str | PathLike[str],
    base: str | PathLike[str],
    out: str | PathLike[str],
    *,
    rank: int | None = None,
    energy: float | None = None,
    min_rank: int | None = None,
    max_rank: int | None = None,
    modules: str | None = None,
    save: str | None = None,
    dtype: str = "float32",
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Extraction:
    """Write the difference of a fine-tune and its base as a LoRA adapter that PEFT loads.

    Args:
        tuned: The fine-tune, as in a recipe.
        base: The model that it was trained from.
        out: The output folder; nothing that Isthmus did not write is ever replaced.
        rank: The rank in every module; 32 unless `energy` is given.
        energy: Instead, the share of the squared norm of each module's change to keep: each gets
            the smallest rank that does.
        min_rank: With `energy`, the smallest rank.
        max_rank: With `energy`, the largest.
        modules: A regular expression to be found in the names of the modules for LoRA; by default
            all linear layers but the output embedding.
        save: A regular expression to be found in the names of other tensors: the modules of those
            that changed are stored in full.
        dtype: The format of the factors.
        overwrite: Replace an earlier output.
        progress: Is told how far the extraction is.

    Raises:
        CheckpointError: if a model cannot be opened or read.
        PlanError: if the two do not correspond, nothing changed, or options contradict each other.
        OutputError: if the folder cannot be used.
        NonFiniteError: if an input holds NaN or infinity, or a factor overflows.

    Example:
        >>> done = isthmus.extract("tuned", "base", "adapter", energy=0.9)  # doctest: +SKIP
        >>> print(done.kept, [module.rank for module in done.modules])  # doctest: +SKIP
    """
    target = Path(out)

    def card(done: Extraction, settings: str) -> str:
        return adapter_card(
            title=_title(target),
            tuned=str(tuned),
            base=str(base),
            ranks=[module.rank for module in done.modules],
            kept=done.kept,
            kept_of_everything=done.kept_of_everything,
            settings=settings,
            notes=done.notes,
            version=version("isthmus"),
        )

    return extraction.extract(
        str(tuned),
        str(base),
        target,
        ranks=Ranks.chosen(rank, energy, min_rank, max_rank),
        version=version("isthmus"),
        card=card,
        modules=modules,
        save=save,
        dtype=dtype,
        overwrite=overwrite,
        progress=progress,
    )


def check_output(
    made: Plan, out: str | PathLike[str], *, resume: bool = False, overwrite: bool = False
) -> None:
    """Refuse what `run_plan` would refuse to write, without writing anything.

    Raises:
        PlanError: if the folder holds an input, or the disk is too small.
        OutputError: if the folder cannot be used.
    """
    output.check_output(
        made, Path(out).absolute(), version=version("isthmus"), resume=resume, overwrite=overwrite
    )


def _recipe(recipe: RecipeLike) -> Recipe:
    return recipe if isinstance(recipe, Recipe) else load_recipe(recipe)


def _card(done: Plan, out: Path) -> str:
    return model_card(
        title=done.recipe.name or _title(out),
        method=done.method.name,
        reference=done.method.reference,
        models=[entry.model for entry in done.recipe.experts],
        base_model=done.base_name,
        recipe=done.recipe.to_yaml(),
        dtypes=Counter(info.dtype.torch_name for task in done.tasks for info in task.outputs),
        notes=done.notes,
        version=version("isthmus"),
        library="peft" if done.makes_adapter else "transformers",
    )


def _title(out: Path) -> str:
    # Any bytes may name a folder; a card is text.
    return out.absolute().name.encode("utf-8", "replace").decode()
