"""GeoMerge: the Fréchet mean of low-rank updates on the quotient by their gauge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from isthmus.errors import MethodError
from isthmus.methods.deltas import difference
from isthmus.methods.method import BaseUse, Chunk, Combine, Method, Settings, TensorStream
from isthmus.methods.parameters import Parameter, Scope
from isthmus.methods.weighted import numbers, weighted_sum
from isthmus.typing import Array

if TYPE_CHECKING:
    from isthmus.geometry.factored import Factored
    from isthmus.geometry.fixed_rank import Polar
    from isthmus.geometry.frechet import FrechetMean, Loss
    from isthmus.geometry.lift import Lifted
    from isthmus.geometry.low_rank import Distance
    from isthmus.methods.adapters import LowRankMerge

LEFT_OUT = "adapters that leave a module alone take no part in its mean"
WEAK = (
    "adapters less than 1e-9 times as strong in a module as the strongest one take no part in its "
    "mean"
)
RAISED = (
    "updates of a lower rank were raised to that of the mean, by the strongest directions of the "
    "others at a tenth of their own smallest singular value"
)
CUT = "updates of a higher rank were cut to that of the mean"
LOWER = "the updates span too little for a mean of the asked rank; the rest of it is zero"
UNSETTLED = (
    "the adapters are so far apart that many means are about equally good; the descent ended, not "
    "converged, where they hardly differ"
)
UNCERTIFIED = (
    "the mean converged, but an adapter is farther from it than the radius within which its "
    "distance is certainly the shortest"
)
NO_GEODESIC = (
    "no geodesic was found to some adapter, as where they are on each other's cut locus; this is "
    "their mean by chords"
)


@dataclass(frozen=True, kw_only=True)
class GeoMerge(Method):
    """argmin_μ Σ w_k ρ(d(μ, ΔW_k)) over the matrices of one rank, weights of sum 1, times lambda.

    What adapters store in full lies in flat space, where the mean of squared distances is the
    weighted average.
    """

    def check(self, settings: Settings) -> None:
        """Some weight must be positive, and loss, delta and distance go together."""
        if not any(weight > 0 for weight in numbers(settings, "weight")):
            raise MethodError("all weights are zero", "Give one model at least a positive weight.")
        loss, delta = settings.shared["loss"], settings.shared["delta"]
        if (loss == "huber") != (delta is not None):
            raise MethodError(
                f"loss: {loss} with delta: {'none' if delta is None else delta}",
                "Give delta, a distance, with loss: huber and with no other loss.",
            )
        distance = settings.shared["distance"]
        if loss != "squared" and distance != "canonical":
            raise MethodError(
                f"distance: {distance} has only the squared loss, not {loss}",
                "Take distance: canonical, or loss: squared.",
            )

    def prepare(self, tensor: TensorStream, settings: Settings) -> Combine:  # noqa: ARG002
        """The weighted average of task vectors."""
        self.check(settings)
        weights = numbers(settings, "weight")
        factor = _factor(settings)
        shares = [weight / sum(weights) for weight in weights]

        def combine(chunk: Chunk) -> Array:
            merged = weighted_sum(difference(chunk).rows, shares)
            if factor != 1:
                merged *= factor
            merged += chunk.base
            return merged

        return combine

    def merge_low_rank(
        self, updates: Sequence[Factored], settings: Settings, rank: int
    ) -> LowRankMerge:
        """The mean in the joint column and row spaces of the updates.

        Zero updates, at infinite distance from all of that rank, those NEGLIGIBLE beside the
        strongest, and updates of weight 0 are left out. One that is alone comes back. Others are
        brought to one rank (`geometry.lift`).

        Raises:
            MethodError: if the settings admit no merge.
        """
        import torch

        from isthmus.geometry.factored import NEGLIGIBLE, Factored, joint
        from isthmus.geometry.lift import lifted
        from isthmus.geometry.low_rank import stacked_mean
        from isthmus.methods.adapters import LowRankMerge

        self.check(settings)
        weights = numbers(settings, "weight")
        counted = [k for k, weight in enumerate(weights) if weight > 0]
        left, right, cores = joint([updates[k] for k in counted])
        norms = torch.linalg.matrix_norm(cores)
        changing = norms > NEGLIGIBLE * norms.max()
        without = [k for k, changes in zip(counted, changing.tolist(), strict=True) if not changes]
        notes = tuple(_of_absent([updates[k] for k in without]))
        present = [k for k, changes in zip(counted, changing.tolist(), strict=True) if changes]
        factor = _factor(settings)
        if len(present) < 2:
            alone = updates[present[0]] if present else Factored.zero(*updates[0].shape)
            return LowRankMerge(*alone.double().scaled(factor).recompressed(rank), notes)
        share = torch.tensor([weights[k] for k in present], dtype=torch.float64)
        share = share / share.sum()
        points = lifted(cores[changing], share, rank)
        found = stacked_mean(
            points.points,
            share,
            cast("Distance", settings.shared["distance"]),
            cast("Loss", settings.shared["loss"]),
            cast("float | None", settings.shared["delta"]),
        )
        one, two = found.mean.pair()
        merged = Factored(left @ one, two @ right.mT).scaled(factor)
        notes += tuple(_of_ranks(points, rank)) + tuple(_of_mean(found))
        return LowRankMerge(*merged.recompressed(rank), notes)


def _factor(settings: Settings) -> float:
    return float(cast("float", settings.shared["lambda"]))


def _of_absent(updates: Sequence[Factored]) -> Iterator[str]:
    if any(update.exponent == -math.inf for update in updates):
        yield LEFT_OUT
    if any(update.exponent > -math.inf for update in updates):
        yield WEAK


def _of_ranks(points: Lifted, rank: int) -> Iterator[str]:
    if points.raised.any():
        yield RAISED
    if points.cut.any():
        yield CUT
    if points.points.b.shape[-1] < rank:
        yield LOWER


def _of_mean(found: FrechetMean[Polar]) -> Iterator[str]:
    if found.distances.isinf().any():
        yield NO_GEODESIC
    elif not found.converged:
        yield UNSETTLED
    elif not found.certified.all():
        yield UNCERTIFIED


GEOMERGE = GeoMerge(
    name="geomerge",
    summary="Fréchet mean of adapters on the quotient of low-rank matrices by their gauge.",
    reference="GeoMerge, arXiv 2604.27155; geometry of Bonnabel and Sepulchre 2009, section 3",
    explanation=(
        "Writes each update as U B Vᵀ, with orthonormal U and V and positive definite B, and finds "
        "the matrix of the asked rank with the least mean squared distance to all of them, "
        "whatever the bases of U, B and V. Directions are averaged along arcs and strengths "
        "geometrically, so norms do not shrink where adapters disagree. distance: canonical is the "
        "paper's, grassmann and projection are cheaper relatives. loss: median or huber resists an "
        "adapter that is unlike the others. Adapters of unrelated tasks have nearly orthogonal "
        "spaces; then many means are about equally good, and the merge says so. Weights are "
        "divided by their sum. Updates of a lower rank than asked are raised, those of a higher "
        "one cut, and an adapter that leaves a module alone takes no part in its mean."
    ),
    parameters=(
        Parameter(
            "weight", float, Scope.EXPERT, "How much this adapter counts.", default=1.0, minimum=0
        ),
        Parameter(
            "distance",
            str,
            Scope.GLOBAL,
            "Between low-rank matrices: geodesic, by principal angles, or by chords.",
            default="canonical",
            choices=("canonical", "grassmann", "projection"),
        ),
        Parameter(
            "loss",
            str,
            Scope.GLOBAL,
            "Of a distance: squared for the mean, or huber, or median.",
            default="squared",
            choices=("squared", "huber", "median"),
        ),
        Parameter(
            "delta",
            float,
            Scope.GLOBAL,
            "The distance from which the Huber loss grows linearly.",
            minimum=0,
            open_minimum=True,
        ),
        Parameter("lambda", float, Scope.GLOBAL, "Factor on the merged update.", default=1.0),
    ),
    base=BaseUse.REQUIRED,
    spaces=("quotient",),
    adapters_only=True,
    absent_is_zero=False,
    gauge="The merged adapter does not depend on the factorisation: it is a mean of matrices.",
)
