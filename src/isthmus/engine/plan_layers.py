"""Planning the merge of a network's linear layers on calibration data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from isthmus.checkpoints import Checkpoint, Dtype
from isthmus.engine.layer_stage import LayerStage
from isthmus.engine.tasks import MergeTask
from isthmus.errors import MethodError, PlanError
from isthmus.methods.calibrated import FISHER, NONE, PROJECTION, REGMEAN_PLUS_PLUS
from isthmus.methods.method import Method, Settings
from isthmus.methods.weighted import numbers
from isthmus.recipes import Recipe

if TYPE_CHECKING:
    from isthmus.models.layer_merges import Examples, LayerPlan
    from isthmus.models.layers import Layer
    from isthmus.projection.layer import Rule


def plan_layers(
    recipe: Recipe,
    donor: Checkpoint,
    experts: Sequence[Checkpoint],
    merges: Mapping[str, MergeTask],
    *,
    updated: Collection[str] | None = None,
) -> LayerStage:
    """Find the linear layers among the tensors to merge, and read the calibration data.

    Args:
        recipe: For a method that looks at data.
        donor: The base model.
        experts: The models that are merged.
        merges: The tensors that all have, by their name in the donor.
        updated: For adapters: the weights with low-rank updates, in the span of which the result lies.

    Raises:
        CalibrationError: if the network cannot be built, or the data cannot be used.
        PlanError: if settings exclude each other, or no layer is left.
    """
    from isthmus.models.layers import linear_layers
    from isthmus.models.merged_view import Mean, MergedView

    method = recipe.method
    plans = [
        _layer_plan(number, method, layer, merges)
        for number, layer in enumerate(linear_layers(donor))
        if layer.weight in merges
        and (updated is None or layer.weight in updated)
        and merges[layer.weight].settings.shared.get("basis", None) != NONE
    ]
    if not plans:
        raise PlanError(
            f"no linear layer of {donor.label} is left for {method.name}",
            "See that a basis other than none matches some; isthmus plan --tensors lists names.",
        )
    if updated is not None:
        _require_span(plans)
    settings = [merges[plan.layer.weight].settings for plan in plans]
    sequential = _sequential(method, settings)
    means = {
        name: Mean(
            tuple(operand.name for operand in task.experts),
            tuple(numbers(task.settings, "weight")),
        )
        for name, task in merges.items()
    }
    return LayerStage(
        donor=donor,
        experts=tuple(experts),
        plans=tuple(plans),
        view=MergedView(donor, experts, means),
        examples=tuple(
            _examples(recipe, number, expert, donor, sequential=sequential)
            for number, expert in enumerate(experts)
        ),
        sequential=sequential,
        own_targets=method is PROJECTION,
        for_adapters=updated is not None,
    )


def _layer_plan(
    number: int, method: Method, layer: Layer, merges: Mapping[str, MergeTask]
) -> LayerPlan:
    from isthmus.models.layer_merges import LayerPlan

    task = merges[layer.weight]
    bias = None if layer.bias is None else merges.get(layer.bias)
    try:
        rule = _rule(method, task.settings)
    except MethodError as error:
        raise PlanError(f"{layer.weight}: {error.problem}", error.cure) from error
    return LayerPlan(
        number=number,
        layer=layer,
        weights_of=tuple(operand.name for operand in task.experts),
        biases_of=None if bias is None else tuple(operand.name for operand in bias.experts),
        rule=rule,
        weights=tuple(numbers(task.settings, "weight")),
        seeds=task.settings.seeds,
        wide=task.output.dtype is Dtype.F64,
    )


def _rule(method: Method, settings: Settings) -> Rule:
    """What `isthmus.projection` is told about a layer."""
    from isthmus.projection.layer import FisherRule, ProjectionRule, RegMeanRule

    said = settings.shared
    if method is PROJECTION:
        directions = said["directions"]
        return ProjectionRule(
            basis=str(said["basis"]),
            group=int(said["group"] or 1),
            constraint=str(said["constraint"]),
            upper=float(said["upper"] or 1),
            ridge=float(said["ridge"] or 0),
            directions=None if directions is None else int(directions),
        )
    if method is FISHER:
        diagonal = said["form"] == "diagonal"
        return FisherRule("diagonal" if diagonal else "kronecker", float(said["damping"] or 0))
    return RegMeanRule(float(said["keep"] or 0))


def _require_span(plans: Sequence[LayerPlan]) -> None:
    """Refuse corrections that no adapter holds at the sum of the ranks."""
    from isthmus.projection.layer import ProjectionRule

    for plan in plans:
        basis = plan.rule.basis if isinstance(plan.rule, ProjectionRule) else None
        if basis not in {"scalar", "diagonal", "columns"}:
            raise PlanError(
                f"{plan.layer.weight}: basis: {basis} leaves the span of the adapters",
                "Take basis: scalar, diagonal or columns. For a whole model, list base+adapter.",
            )


def _sequential(method: Method, settings: Sequence[Settings]) -> bool:
    if method is not PROJECTION:
        return method is REGMEAN_PLUS_PLUS
    found = {bool(one.shared["sequential"]) for one in settings}
    if len(found) > 1:
        raise PlanError(
            "sequential is true for some layers and false for others",
            "It is one value for the whole merge: write it without a filter.",
        )
    return found.pop()


def _examples(
    recipe: Recipe, number: int, expert: Checkpoint, donor: Checkpoint, *, sequential: bool
) -> Examples:
    """Stored statistics, or the batches of an expert's examples."""
    from isthmus.models.data import calibration_batches
    from isthmus.models.store import DESCRIPTION, StoredMoments

    said = recipe.calibration_of(recipe.experts[number])
    path = said.path(recipe.root)
    if (path / DESCRIPTION).is_file():
        if sequential:
            raise PlanError(
                f"{path} holds statistics, and a sequential merge runs the models on examples",
                "Name the examples themselves, or write sequential: false.",
            )
        stored = StoredMoments(path)
        stored.require_model(expert)
        return stored
    given = {"examples": said.examples, "tokens": said.tokens, "seed": said.seed}
    return calibration_batches(
        expert,
        path,
        column=said.column,
        lender=donor,
        **{key: value for key, value in given.items() if value is not None},
    )
