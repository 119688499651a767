"""From a recipe to a plan: open what it names, and see whether it is models or adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from isthmus.checkpoints import Adapter, find_adapter, open_adapter, open_checkpoint, parse_size
from isthmus.engine.aligning import aligned
from isthmus.engine.plan import DEFAULT_SHARD_SIZE, Plan
from isthmus.engine.plan_adapters import plan_adapters, require_adapter_method
from isthmus.engine.plan_models import plan_models
from isthmus.errors import PlanError
from isthmus.methods.method import BaseUse
from isthmus.recipes import Recipe


@contextmanager
def planned(
    recipe: Recipe,
    *,
    device: str = "cpu",
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    allow_nonfinite: bool = False,
) -> Iterator[Plan]:
    """Open the models or adapters of a recipe and plan the merge; they close at the end.

    Args:
        recipe: What to merge.
        device: `cpu`, or a torch device; adapters are small and merge on the processor.
        max_shard_size: Bytes of the largest weight file, or text such as `5GB`.
        allow_nonfinite: Let NaN and infinity pass.

    Raises:
        CheckpointError: if a model cannot be opened.
        PlanError: if the models cannot be merged as asked.
    """
    limit = parse_size(max_shard_size)
    folders = {entry.model: find_adapter(entry.model, root=recipe.root) for entry in recipe.experts}
    with ExitStack() as stack:
        adapters: dict[str, Adapter] = {
            reference: stack.enter_context(open_adapter(folder, label=reference))
            for reference, folder in folders.items()
            if folder is not None
        }
        if adapters and len(adapters) == len(folders):
            require_adapter_method(recipe.method)
            if recipe.finish is not None:
                raise PlanError(
                    "finish runs whole models, and these are adapters", "Remove `finish:`."
                )
            if recipe.align is not None:
                raise PlanError(
                    "align moves whole models, and these are adapters",
                    "Adapters of one base need no alignment: remove `align:`.",
                )
            base = None
            if recipe.base_model is not None:
                base = stack.enter_context(open_checkpoint(recipe.base_model, root=recipe.root))
            yield plan_adapters(
                recipe, adapters, base, max_shard_size=limit, allow_nonfinite=allow_nonfinite
            )
            return
        _require_models(recipe, [name for name in folders if name in adapters])
        opened = {
            reference: stack.enter_context(open_checkpoint(reference, root=recipe.root))
            for reference in recipe.references
        }
        if recipe.stays is not None:
            opened = aligned(recipe, opened, recipe.stays)
        yield plan_models(
            recipe, opened, device=device, max_shard_size=limit, allow_nonfinite=allow_nonfinite
        )


def _require_models(recipe: Recipe, adapters: list[str]) -> None:
    """Refuse what only a merge of adapters can mean."""
    if adapters:
        raise PlanError(
            f"{adapters[0]} is an adapter, and other models of the recipe are not",
            "Merge adapters with adapters. To merge its model, write the base model before it, with "
            f"a plus sign between: base+{adapters[0]}.",
        )
    method = recipe.method
    if method.adapters_only:
        raise PlanError(
            f"{method.name} merges adapters, and {recipe.experts[0].model} is none",
            "Extract an adapter from it: isthmus extract. Or take another method.",
        )
    if recipe.for_adapters:
        raise PlanError(
            f"{recipe.for_adapters[0]} says how adapters are merged, and these are whole models",
            "Remove it from the recipe.",
        )
    if method.base is BaseUse.REQUIRED and recipe.base_model is None:
        raise PlanError(f"{method.name} needs base_model", "Add: `base_model: PATH`.")
