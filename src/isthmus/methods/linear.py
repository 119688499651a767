"""Weighted average of models."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.methods.method import (
    BaseUse,
    Chunk,
    Combine,
    Method,
    Settings,
    TensorStream,
    WeightedSum,
)
from isthmus.methods.parameters import Parameter, Scope
from isthmus.methods.task_vectors import SUMMED
from isthmus.methods.weighted import divisor, numbers, weighted_sum
from isthmus.typing import Array


@dataclass(frozen=True, kw_only=True)
class Linear(Method):
    """sum_k w_k x_k, divided by sum_k w_k unless told otherwise."""

    def check(self, settings: Settings) -> None:
        """Weights that are normalised must not sum to zero."""
        self.weighted_sum(settings)

    def weighted_sum(self, settings: Settings) -> WeightedSum:
        """The weights, and their sum if they are normalised."""
        weights = numbers(settings, "weight")
        normalize = bool(settings.shared["normalize"])
        return WeightedSum(tuple(weights), divisor(weights, normalize=normalize))

    def coefficients(self, settings: Settings) -> tuple[float, ...]:
        """The weights, normalised if they shall be: the average of task vectors too."""
        total = self.weighted_sum(settings)
        return tuple(weight / total.divisor for weight in total.weights)

    def prepare(self, tensor: TensorStream, settings: Settings) -> Combine:  # noqa: ARG002
        """Nothing depends on the whole tensor."""
        total = self.weighted_sum(settings)

        def combine(chunk: Chunk) -> Array:
            merged = weighted_sum(chunk.experts, total.weights)
            if total.divisor != 1:
                merged /= total.divisor
            return merged

        return combine


LINEAR = Linear(
    name="linear",
    summary="Weighted average of the models' weights (model soups).",
    reference="Wortsman et al. 2022, arXiv 2203.05482, section 3",
    explanation=(
        "Adds up the models, each times its weight, and divides by the sum of the weights. With "
        "equal weights this is the uniform soup. The base model counts only when it is listed "
        "among the models. Set normalize: false to keep the plain weighted sum."
    ),
    parameters=(
        Parameter("weight", float, Scope.MODEL, "How much this model counts.", required=True),
        Parameter(
            "normalize", bool, Scope.GLOBAL, "Divide by the sum of the weights.", default=True
        ),
    ),
    base=BaseUse.IGNORED,
    propagates=True,
    spaces=("core", "knots", "full"),
    gauge=SUMMED,
)
