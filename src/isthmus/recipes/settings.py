"""What a recipe says about one parameter: numbers, gradients over depth, filters on names."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from isthmus.errors import MethodError
from isthmus.methods.parameters import Parameter, ParameterValue
from isthmus.recipes.document import KeyPath
from isthmus.recipes.problems import Problems, nearest


@dataclass(frozen=True, slots=True)
class Rule:
    """A value for the tensors that a filter lets through.

    Attributes:
        filter: Text that the tensor's name must contain; None lets every name through.
        values: The value at even steps of depth, from the first layer to the last; at least one.
    """

    filter: str | None
    values: tuple[ParameterValue, ...]

    def at(self, depth: Fraction) -> ParameterValue:
        """The value at a depth from 0 to 1: numbers interpolate, the rest steps."""
        place = depth * (len(self.values) - 1)
        index = int(place)
        left = self.values[index]
        if isinstance(left, bool | str) or place == index:
            return left
        right = float(self.values[index + 1])
        share = float(place - index)
        between = (1 - share) * left + share * right
        # Rounding must not carry a value past the ends, which may be the limits of the parameter.
        return min(max(between, min(left, right)), max(left, right))

    def plain(self) -> Any:
        """The value as in YAML."""
        return self.values[0] if len(self.values) == 1 else list(self.values)


@dataclass(frozen=True, slots=True)
class Setting:
    """The rules for one parameter; the first whose filter matches counts."""

    rules: tuple[Rule, ...]

    def at(self, tensor_name: str, depth: Fraction) -> ParameterValue | None:
        """The value for a tensor, or None when no filter matches its name."""
        for rule in self.rules:
            if rule.filter is None or rule.filter in tensor_name:
                return rule.at(depth)
        return None

    def plain(self) -> Any:
        """The setting as in YAML, in the shortest form."""
        if len(self.rules) == 1 and self.rules[0].filter is None:
            return self.rules[0].plain()
        return [
            ({} if rule.filter is None else {"filter": rule.filter}) | {"value": rule.plain()}
            for rule in self.rules
        ]


def read_setting(
    raw: Any, parameter: Parameter, path: KeyPath, problems: Problems
) -> Setting | None:
    """Check a parameter's value, every number in it included.

    Args:
        raw: A scalar, a list of scalars, a mapping of filter and value, or a list of those.
        parameter: What the method says about the parameter.
        path: Where the value is.
        problems: Takes what is wrong.

    Returns:
        The setting, or None if something is wrong with it.
    """
    if isinstance(raw, dict):
        rules = [_read_rule(raw, parameter, path, problems)]
    elif isinstance(raw, list) and any(isinstance(item, dict) for item in raw):
        rules = [
            _read_rule(item, parameter, (*path, index), problems) for index, item in enumerate(raw)
        ]
    else:
        values = _read_values(raw, parameter, path, problems)
        rules = [Rule(None, values) if values else None]
    sound = tuple(rule for rule in rules if rule)
    return Setting(sound) if len(sound) == len(rules) else None


def _read_rule(raw: Any, parameter: Parameter, path: KeyPath, problems: Problems) -> Rule | None:
    if not isinstance(raw, dict):
        problems.add(
            path,
            f"{parameter.name} mixes plain values with filters",
            f"Write `- value: {raw}` for the tensors that no filter names.",
        )
        return None
    unknown = [key for key in raw if key not in ("filter", "value")]
    for key in unknown:
        near = nearest(key, ("filter", "value"))
        hint = f"; did you mean {near!r}?" if near else "; known are filter, value"
        problems.add((*path, key), f"unknown key {key!r} of a filter{hint}")
    if unknown:
        return None
    pattern = raw.get("filter")
    if pattern is not None and not isinstance(pattern, str):
        problems.add(
            (*path, "filter"),
            f"filter must be text that tensor names contain, not {pattern!r}; put it in quotes",
        )
        return None
    if "value" not in raw:
        problems.add(path, f"this filter of {parameter.name} has no value", "Add a line `value:`.")
        return None
    values = _read_values(raw["value"], parameter, (*path, "value"), problems)
    return Rule(None if pattern in ("", "*") else pattern, values) if values else None


def _read_values(
    raw: Any, parameter: Parameter, path: KeyPath, problems: Problems
) -> tuple[ParameterValue, ...] | None:
    if raw == []:
        problems.add(path, f"{parameter.name} is an empty list", "Give it at least one value.")
        return None
    if not isinstance(raw, list):
        value = _read_scalar(raw, parameter, path, problems)
        return None if value is None else (value,)
    values = [
        _read_scalar(item, parameter, (*path, index), problems) for index, item in enumerate(raw)
    ]
    sound = tuple(value for value in values if value is not None)
    return sound if len(sound) == len(values) else None


def _read_scalar(
    raw: Any, parameter: Parameter, path: KeyPath, problems: Problems
) -> ParameterValue | None:
    if raw is None:
        problems.add(path, f"{parameter.name} has no value")
        return None
    # Its hundreds of digits would not make a better message.
    if isinstance(raw, int) and abs(raw) > sys.float_info.max:
        problems.add(path, f"{parameter.name} is too large a number")
        return None
    try:
        return parameter.validate(raw)
    except MethodError as error:
        cure = error.cure
        if parameter.kind is bool and isinstance(raw, str):
            cure = "Write true or false, without quotes."
        problems.add(path, error.problem, cure)
    return None
