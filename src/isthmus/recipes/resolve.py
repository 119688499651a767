"""A method's parameters at one tensor: which level, which filter, which depth."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence

from isthmus.errors import RecipeError
from isthmus.methods.method import Method, Settings
from isthmus.methods.parameters import Parameter, ParameterValue, Scope
from isthmus.recipes.depth import Depths
from isthmus.recipes.schema import Recipe
from isthmus.recipes.settings import Setting


def resolve_settings(recipe: Recipe, method: Method, tensor_name: str, depths: Depths) -> Settings:
    """What the recipe says about one tensor.

    A model's own parameters go before the recipe's, and those before the method's defaults. A
    level whose filters all miss the tensor is as good as silent.

    Args:
        recipe: A recipe for this method.
        method: The merge method.
        tensor_name: One of the names that `depths` was made from.
        depths: The depth of every tensor.

    Returns:
        Values and seeds in the order of `recipe.experts`.

    Raises:
        RecipeError: if a required parameter is given for other tensors only.
    """
    experts = recipe.experts
    depth = depths.of(tensor_name)

    def value(parameter: Parameter, *levels: Mapping[str, Setting]) -> ParameterValue | None:
        for level in levels:
            setting = level.get(parameter.name)
            found = None if setting is None else setting.at(tensor_name, depth)
            if found is not None:
                return found
        if parameter.required:
            raise RecipeError(
                f"{method.name} needs {parameter.name!r}, but none of its filters matches the "
                f"tensor {tensor_name}",
                f"Add an entry without filter at the end of {parameter.name}: `- value: ...`.",
            )
        return parameter.default

    shared: dict[str, ParameterValue | None] = {}
    per_expert: dict[str, tuple[ParameterValue | None, ...]] = {}
    for parameter in method.parameters:
        if parameter.scope is Scope.GLOBAL:
            shared[parameter.name] = value(parameter, recipe.parameters)
        else:
            per_expert[parameter.name] = tuple(
                value(parameter, entry.parameters, recipe.parameters) for entry in experts
            )
    seeds = _seeds(recipe.seed, tensor_name, [entry.model for entry in experts])
    return Settings(shared, per_expert, seeds)


def _seeds(seed: int, tensor_name: str, labels: Sequence[str]) -> tuple[int, ...]:
    """A number below 2**128 for each expert, whatever the order of the experts.

    A model that is listed twice gets two numbers.
    """
    occurrences: Counter[str] = Counter()
    seeds = []
    for label in labels:
        key = json.dumps([seed, tensor_name, label, occurrences[label]])
        occurrences[label] += 1
        seeds.append(int.from_bytes(hashlib.sha256(key.encode()).digest()[:16], "big"))
    return tuple(seeds)
