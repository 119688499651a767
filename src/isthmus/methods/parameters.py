"""What a method's parameters are: names, types, defaults, ranges, and to whom they belong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from isthmus.errors import MethodError

ParameterValue: TypeAlias = float | bool | str
"""A parameter at one tensor, after filters and gradients are resolved."""


class Scope(Enum):
    """To whom a parameter belongs."""

    GLOBAL = "global"
    """One value for the whole merge."""
    MODEL = "model"
    """One value for each model, the base included when it is listed."""
    EXPERT = "expert"
    """One value for each model except the base."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a method.

    Attributes:
        name: The key in a recipe.
        kind: `float`, `bool` or `str`.
        scope: To whom it belongs.
        summary: One sentence for `isthmus methods`.
        default: The value when a recipe is silent; None with `required` false means "off".
        required: Whether a recipe must give it.
        minimum, maximum: Bounds of a number, both allowed values unless `open_minimum`.
        open_minimum: Whether `minimum` itself is forbidden.
        choices: The allowed strings.
        ignored: Whether it is accepted for the sake of others' recipes and has no effect.
    """

    name: str
    kind: type[float] | type[bool] | type[str]
    scope: Scope
    summary: str
    default: ParameterValue | None = None
    required: bool = False
    minimum: float = -math.inf
    maximum: float = math.inf
    open_minimum: bool = False
    choices: tuple[str, ...] = ()
    ignored: bool = False

    def validate(self, value: Any) -> ParameterValue:
        """The value in the parameter's own type.

        Raises:
            MethodError: if the value is of the wrong type, not finite, or out of range.
        """
        if self.kind is bool:
            # Recipes write 1 and 1.0 for true as well.
            if value in (0, 1):
                return bool(value)
            raise MethodError(f"{self.name} must be true or false, not {value!r}")
        if self.kind is str:
            if value in self.choices:
                return str(value)
            raise MethodError(
                f"{self.name} must be one of {', '.join(self.choices)}, not {value!r}"
            )
        return self._number(value)

    def _number(self, value: Any) -> float:
        # YAML 1.1 reads 1e-3 as a string; people mean the number.
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if isinstance(value, bool) or not math.isfinite(number):
            raise MethodError(f"{self.name} must be a finite number, not {value!r}")
        low = number <= self.minimum if self.open_minimum else number < self.minimum
        if low or number > self.maximum:
            raise MethodError(f"{self.name} must be in {self.range}, not {number:g}")
        return number

    @property
    def range(self) -> str:
        """The allowed numbers in interval notation, such as `(0, 1]`."""
        left = "(" if self.open_minimum or self.minimum == -math.inf else "["
        right = ")" if self.maximum == math.inf else "]"
        return f"{left}{self.minimum:g}, {self.maximum:g}{right}"
