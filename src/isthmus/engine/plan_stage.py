"""Planning what a merge does on calibration data: which layers or coefficients, and the examples."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from isthmus.checkpoints import Checkpoint, Dtype
from isthmus.engine.layer_stage import LayerStage
from isthmus.engine.network_stage import NetworkStage
from isthmus.engine.stage import Stage
from isthmus.engine.tasks import MergeTask
from isthmus.errors import MethodError, PlanError
from isthmus.methods.calibrated import FISHER, NETWORK, NONE, PROJECTION, REGMEAN_PLUS_PLUS
from isthmus.methods.method import Method, Settings
from isthmus.methods.parameters import ParameterValue
from isthmus.methods.weighted import numbers
from isthmus.recipes import Recipe

if TYPE_CHECKING:
    from isthmus.models.layer_merges import Examples, LayerPlan
    from isthmus.models.layers import Layer
    from isthmus.projection.layer import Rule


def plan_stage(
    recipe: Recipe,
    donor: Checkpoint,
    experts: Sequence[Checkpoint],
    merges: Mapping[str, MergeTask],
    *,
    updated: Collection[str] | None = None,
) -> Stage:
    """See what is merged on calibration data, and read the data.

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
    settings = [task.settings for task in merges.values()]
    network = recipe.method is PROJECTION and _one_value("objective", settings) == NETWORK
    sequential = network or _sequential(recipe.method, settings)
    examples = tuple(
        _examples(recipe, number, expert, donor, stored=not sequential)
        for number, expert in enumerate(experts)
    )
    said = recipe.calibration.activations if recipe.calibration else None
    if network:
        if said is not None:
            raise PlanError(
                f"calibration says activations: {said}, and with objective: network nothing waits between "
                "blocks, since all models run as a whole",
                "Leave activations out.",
            )
        return _network_stage(donor, experts, merges, examples)
    stage = _layer_stage(recipe.method, donor, experts, merges, updated, examples, sequential)
    return stage if said is None else replace(stage, activations=said)


def _network_stage(
    donor: Checkpoint,
    experts: Sequence[Checkpoint],
    merges: Mapping[str, MergeTask],
    examples: tuple[Examples, ...],
) -> NetworkStage:
    from isthmus.models.parameter_groups import GROUPINGS
    from isthmus.models.scaled_view import ScaledView
    from isthmus.projection.layer import constraint_named

    settings = [task.settings for task in merges.values()]

    def said(name: str) -> ParameterValue | None:
        return _one_value(name, settings)

    basis = said("basis")
    if basis not in GROUPINGS:
        raise PlanError(
            f"basis: {basis} has a coefficient for every place of a layer, too many for objective: network",
            f"Write basis: {', '.join(GROUPINGS)}, or objective: layer.",
        )
    if said("constraint") == "simplex" and basis != "scalar":
        raise PlanError(
            f"a simplex does not go with basis: {basis}, whose coefficients of all groups would sum to one",
            "Write constraint: box, or basis: scalar.",
        )
    weights = _one_tuple(settings)
    return NetworkStage(
        donor=donor,
        experts=tuple(experts),
        view=ScaledView(
            donor,
            experts,
            {name: [one.name for one in task.experts] for name, task in merges.items()},
            weights,
        ),
        examples=examples,  # type: ignore[arg-type]  # stored moments are refused
        grouping=basis,
        constraint=constraint_named(str(said("constraint")), float(said("upper") or 1)),
        ridge=float(said("ridge") or 0),
        weights=weights,
        sweeps=int(said("sweeps") or 1),
    )


def _layer_stage(
    method: Method,
    donor: Checkpoint,
    experts: Sequence[Checkpoint],
    merges: Mapping[str, MergeTask],
    updated: Collection[str] | None,
    examples: tuple[Examples, ...],
    sequential: bool,
) -> LayerStage:
    from isthmus.models.layers import linear_layers
    from isthmus.models.merged_view import Mean, MergedView

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
            "See that a basis other than none matches some; --dry-run --all lists all names with basis: scalar.",
        )
    if updated is not None:
        _require_span(plans)
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
        examples=examples,
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
    return bool(_one_value("sequential", settings))


def _one_value(name: str, settings: Sequence[Settings]) -> ParameterValue | None:
    """A parameter that cannot differ between tensors."""
    found = {one.shared[name] for one in settings}
    if len(found) > 1:
        raise PlanError(
            f"{name} is {' for some tensors and '.join(sorted(map(str, found)))} for others",
            "It is one value for the whole merge: write it without a filter or gradient.",
        )
    return found.pop()


def _one_tuple(settings: Sequence[Settings]) -> tuple[float, ...]:
    found = {tuple(numbers(one, "weight")) for one in settings}
    if len(found) > 1:
        raise PlanError(
            "weight differs between tensors, and objective: network weighs tasks",
            "Give each model one number.",
        )
    return found.pop()


def _examples(
    recipe: Recipe, number: int, expert: Checkpoint, donor: Checkpoint, *, stored: bool
) -> Examples:
    """Stored statistics, or the batches of an expert's examples."""
    from isthmus.models.data import calibration_batches
    from isthmus.models.store import DESCRIPTION, StoredMoments

    said = recipe.calibration_of(recipe.experts[number])
    path = said.path(recipe.root)
    if (path / DESCRIPTION).is_file():
        if recipe.align is not None and recipe.experts[number].model != recipe.stays:
            raise PlanError(
                f"{path} holds statistics of {expert.label} as it is, which align moves",
                "Name the examples themselves, or remove `align:`.",
            )
        if not stored:
            raise PlanError(
                f"{path} holds statistics, and this merge runs the models on examples",
                "Name the examples themselves, or write sequential: false.",
            )
        moments = StoredMoments(path)
        moments.require_model(expert)
        return moments
    given = {"examples": said.examples, "tokens": said.tokens, "seed": said.seed}
    return calibration_batches(
        expert,
        path,
        column=said.column,
        lender=donor,
        **{key: value for key, value in given.items() if value is not None},
    )
