"""One model, copied."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.methods.method import BaseUse, Chunk, Combine, Method, Settings, TensorStream
from isthmus.methods.parameters import Parameter, Scope
from isthmus.methods.task_vectors import SUMMED
from isthmus.typing import Array


@dataclass(frozen=True, kw_only=True)
class Passthrough(Method):
    """x, or scale times x."""

    def coefficients(self, settings: Settings) -> tuple[float, ...]:
        """The scale: it scales an adapter's update too."""
        return tuple(
            1.0 if scale is None else float(scale) for scale in settings.per_expert["scale"]
        )

    def prepare(self, tensor: TensorStream, settings: Settings) -> Combine:  # noqa: ARG002
        """Nothing depends on the whole tensor."""
        (scale,) = settings.per_expert["scale"]

        def combine(chunk: Chunk) -> Array:
            return chunk.experts[0, ...] if scale is None else chunk.experts[0, ...] * scale

        return combine


PASSTHROUGH = Passthrough(
    name="passthrough",
    summary="Copies one model, tensors scaled where asked.",
    reference="none; the identity",
    explanation=(
        "Takes exactly one model and returns it. With scale, and a filter to choose tensors, it "
        "dampens or removes parts of a model: scale 0 on o_proj and down_proj switches a layer off."
    ),
    parameters=(Parameter("scale", float, Scope.MODEL, "Factor on this tensor; none by default."),),
    base=BaseUse.IGNORED,
    max_experts=1,
    propagates=True,
    spaces=("core",),
    gauge=SUMMED,
)
