"""Spherical linear interpolation between two models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

from array_api_compat import array_namespace

from isthmus.methods.method import BaseUse, Chunk, Combine, Method, Reach, Settings, TensorStream
from isthmus.methods.parameters import Parameter, Scope
from isthmus.typing import Array

COLLINEAR = 0.9995
"""Cosine beyond which the arc and the chord are the same to rounding."""


def slerp_coefficients(cosine: float, t: float) -> tuple[float, float]:
    """The factors of both ends: sin((1-t)θ)/sin θ and sin(tθ)/sin θ (Shoemake 1985).

    Nearly parallel and nearly opposite ends have no stable great circle; there it is 1-t and t.

    Args:
        cosine: Cosine of the angle θ between the ends.
        t: 0 gives the first end, 1 the second.
    """
    if abs(cosine) > COLLINEAR:
        return 1.0 - t, t
    angle = math.acos(cosine)
    return (
        math.sin((1.0 - t) * angle) / math.sin(angle),
        math.sin(t * angle) / math.sin(angle),
    )


def cosine(tensor: TensorStream) -> float:
    """Cosine of the angle between the base and the only expert, accumulated in float64.

    A zero end has no direction: its cosine with anything is 0.
    """
    dot = base_square = expert_square = 0.0
    for chunk in tensor:
        xp = array_namespace(chunk.experts)
        base = xp.astype(cast("Array", chunk.base), xp.float64)
        expert = xp.astype(chunk.experts[0, ...], xp.float64)
        dot += float(xp.sum(base * expert))
        base_square += float(xp.sum(base * base))
        expert_square += float(xp.sum(expert * expert))
    if base_square == 0 or expert_square == 0:
        return 0.0
    return max(-1.0, min(1.0, dot / math.sqrt(base_square) / math.sqrt(expert_square)))


@dataclass(frozen=True, kw_only=True)
class Slerp(Method):
    """The great circle through two flattened tensors, norms interpolated along."""

    def prepare(self, tensor: TensorStream, settings: Settings) -> Combine:
        """Measure the angle."""
        of_base, of_expert = slerp_coefficients(
            cosine(tensor), float(cast("float", settings.shared["t"]))
        )

        def combine(chunk: Chunk) -> Array:
            return cast("Array", chunk.base) * of_base + chunk.experts[0, ...] * of_expert

        return combine


SLERP = Slerp(
    name="slerp",
    summary="Spherical interpolation between the base and one model.",
    reference="Shoemake 1985, Animating rotation with quaternion curves, section 3.3",
    explanation=(
        "Moves each tensor along the arc from the base model (t = 0) to the other model (t = 1), "
        "so that directions rotate instead of cutting across. Takes exactly two models, one of "
        "them the base. Tensors that are nearly parallel (|cosine| above 0.9995) are interpolated "
        "linearly, where both agree."
    ),
    parameters=(
        Parameter("t", float, Scope.GLOBAL, "0 is the base, 1 the other model.", required=True),
    ),
    base=BaseUse.REQUIRED,
    max_experts=1,
    reach=Reach.REDUCTION,
    propagates=True,
)
