"""The task-vector family: sparsify, elect, combine, and add to the base.

θ = θ_0 + λ · combine_k(w_k · sparsify(θ_k - θ_0))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from isthmus.methods.consensus import merge_agreeing
from isthmus.methods.deltas import Deltas, difference
from isthmus.methods.method import BaseUse, Chunk, Combine, Method, Reach, Settings, TensorStream
from isthmus.methods.parameters import Parameter, Scope
from isthmus.methods.rescale import l1_factors, rescaled
from isthmus.methods.sparsify import Sparsifier, Sparsify, keep_all, keep_largest, keep_random
from isthmus.methods.weighted import divisor, numbers, weighted_sum
from isthmus.typing import Array

WEIGHT = Parameter(
    "weight", float, Scope.EXPERT, "How much this task vector counts.", required=True
)
LAMBDA = Parameter("lambda", float, Scope.GLOBAL, "Factor on the merged task vector.", default=1.0)

SUMMED = "The merged adapter does not depend on the factorisation: updates add up as matrices."
"""The gauge of the methods that add up, whatever the space."""

ENTRYWISE = (
    "The merged adapter does not depend on the factorisation, in any space; it depends on the "
    "space, whose coordinates are what the rule is applied to."
)
"""The gauge of the methods that look at entries."""


@dataclass(frozen=True, kw_only=True)
class TaskVectors(Method):
    """A preset of the grid.

    Attributes:
        sparsifier: Which entries of a task vector stay.
        consensus: Whether experts must agree with the elected sign.
    """

    sparsifier: Sparsifier
    consensus: bool

    def check(self, settings: Settings) -> None:
        """Weights that are normalised must not sum to zero."""
        self._divisor(settings)

    def coefficients(self, settings: Settings) -> tuple[float, ...] | None:
        """Weights and factors, where nothing is dropped and no sign elected."""
        dropping = self.sparsifier is not keep_all and any(
            density < 1 for density in numbers(settings, "density")
        )
        if self.consensus or dropping:
            return None
        factor = self._factor(settings)
        return tuple(factor * weight for weight in numbers(settings, "weight"))

    def prepare(self, tensor: TensorStream, settings: Settings) -> Combine:
        """Read thresholds and norms."""
        weights = numbers(settings, "weight")
        factor = self._factor(settings)
        mean = bool(settings.shared["normalize"])
        sparsify = self._sparsify(Deltas(tensor), settings)

        def combine(chunk: Chunk) -> Array:
            rows = sparsify(difference(chunk))
            merged = (
                merge_agreeing(rows, weights, mean=mean)
                if self.consensus
                else weighted_sum(rows, weights)
            )
            if factor != 1:
                merged *= factor
            merged += chunk.base
            return merged

        return combine

    def _factor(self, settings: Settings) -> float:
        return float(cast("float", settings.shared["lambda"])) / self._divisor(settings)

    def _divisor(self, settings: Settings) -> float:
        # With a consensus the divisor is the weight of those that agree, entry by entry.
        normalize = bool(settings.shared["normalize"]) and not self.consensus
        return divisor(numbers(settings, "weight"), normalize=normalize)

    def _sparsify(self, deltas: Deltas, settings: Settings) -> Sparsify:
        if self.sparsifier is keep_all:
            return keep_all(deltas, (), ())
        densities = numbers(settings, "density")
        sparsify = self.sparsifier(deltas, densities, settings.seeds)
        if not settings.shared["rescale"] or all(density == 1 for density in densities):
            return sparsify
        if settings.shared["rescale_norm"] == "density":
            return rescaled(sparsify, [1 / density for density in densities])
        return rescaled(sparsify, l1_factors(deltas, sparsify, len(densities)))


def normalization(*, default: bool) -> Parameter:
    """The parameter `normalize`."""
    return Parameter(
        "normalize",
        bool,
        Scope.GLOBAL,
        "Divide by the sum of the weights of the experts that count at an entry.",
        default=default,
    )


def _preset(
    *,
    name: str,
    summary: str,
    reference: str,
    explanation: str,
    sparsifier: Sparsifier,
    consensus: bool = False,
    normalize: bool = False,
    rescale: bool = False,
    random: bool = False,
) -> TaskVectors:
    # mergekit takes the parameters of sparse methods for all of them; so do we, and say so.
    sparse = sparsifier is not keep_all
    return TaskVectors(
        name=name,
        summary=summary,
        reference=reference,
        explanation=explanation,
        sparsifier=sparsifier,
        consensus=consensus,
        base=BaseUse.REQUIRED,
        reach=Reach.REDUCTION if sparse else Reach.ELEMENTWISE,
        random=random,
        spaces=("full", "core", "knots") if sparse else ("core", "knots", "full"),
        gauge=ENTRYWISE if sparse else SUMMED,
        parameters=(
            WEIGHT,
            Parameter(
                "density",
                float,
                Scope.EXPERT,
                "Share of the task vector's entries to keep.",
                default=1.0,
                minimum=0,
                open_minimum=True,
                maximum=1,
                ignored=not sparse,
            ),
            LAMBDA,
            normalization(default=normalize),
            Parameter(
                "rescale",
                bool,
                Scope.GLOBAL,
                "Make up for the dropped entries by scaling the kept ones.",
                default=rescale,
                ignored=not sparse,
            ),
            Parameter(
                "rescale_norm",
                str,
                Scope.GLOBAL,
                "l1: until the ℓ1 norm is as before (mergekit); density: by 1/density (the paper).",
                default="l1",
                choices=("l1", "density"),
                ignored=not sparse,
            ),
            Parameter(
                "int8_mask",
                bool,
                Scope.GLOBAL,
                "Accepted for mergekit's recipes; masks take no memory here.",
                default=False,
                ignored=True,
            ),
        ),
    )


TASK_ARITHMETIC = _preset(
    name="task_arithmetic",
    summary="The base plus the weighted sum of task vectors.",
    reference="Ilharco et al. 2023, arXiv 2212.04089, section 2",
    explanation=(
        "A task vector is what fine-tuning changed: expert minus base. Weighted task vectors add "
        "up; a negative weight subtracts what an expert learned. Nothing is dropped: density and "
        "rescale have no effect, as in mergekit."
    ),
    sparsifier=keep_all,
)

MAGNITUDE = _preset(
    name="magnitude",
    summary="Keep the largest entries of each task vector, and add up.",
    reference="Yadav et al. 2023, arXiv 2306.01708, the trim of section 4.1 alone",
    explanation=(
        "Trims task vectors as TIES does, to the share of entries that density tells, and adds "
        "them up as task arithmetic does: no signs are elected. PEFT calls it magnitude_prune, and "
        "prunes the factors of an adapter, not its update. rescale: true makes up for what is "
        "dropped."
    ),
    sparsifier=keep_largest,
)

TIES = _preset(
    name="ties",
    summary="Trim task vectors, elect a sign for every entry, merge the experts that agree.",
    reference="Yadav et al. 2023, arXiv 2306.01708, section 4",
    explanation=(
        "Keeps the largest entries of each task vector (share: density), elects for every entry "
        "the sign with more total weight, and merges only the experts that have that sign. "
        "Implementations of TIES differ in two points. Aggregation: normalize: true, the default "
        "as in mergekit and the paper, takes the mean over the experts that agree; normalize: "
        "false takes their sum, as FusionBench does by default. Trimming: the default density is "
        "1, as in mergekit, hence no trim; the paper keeps 20 %, density: 0.2. The paper then "
        "scales the merged task vector by lambda, which is 1 by default."
    ),
    sparsifier=keep_largest,
    consensus=True,
    normalize=True,
)

DARE_LINEAR = _preset(
    name="dare_linear",
    summary="Drop entries of task vectors at random, rescale, and add up.",
    reference="Yu et al. 2023, arXiv 2311.03099, section 3.2",
    explanation=(
        "Keeps each entry of a task vector with probability density, scales up what is left, and "
        "adds up as task arithmetic does. By default the scale restores the ℓ1 norm, as in "
        "mergekit; rescale_norm: density divides by the density, as in the paper, so that the "
        "expectation is the task vector itself. The draw depends on the recipe's seed, the tensor "
        "and the model alone, not on workers or order."
    ),
    sparsifier=keep_random,
    rescale=True,
    random=True,
)

DARE_TIES = _preset(
    name="dare_ties",
    summary="Drop entries at random and rescale, then elect signs as TIES does.",
    reference="Yu et al. 2023, arXiv 2311.03099, section 3.2, with the election of 2306.01708",
    explanation=(
        "As dare_linear, but an entry takes part only if it has the elected sign. normalize: true "
        "gives the mean over the experts that agree; the default is their sum, as in mergekit."
    ),
    sparsifier=keep_random,
    consensus=True,
    rescale=True,
    random=True,
)
