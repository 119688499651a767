"""Methods that look at what linear layers compute on calibration data.

What they do with a layer is the mathematics of `isthmus.projection`; here are their names and parameters, and
what they do with all that is no linear layer of the network, such as norms and embeddings: the weighted mean.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.errors import MethodError
from isthmus.methods.linear import Linear
from isthmus.methods.method import BaseUse, Settings, WeightedSum
from isthmus.methods.parameters import Parameter, Scope
from isthmus.methods.weighted import divisor, numbers

NONE = "none"
"""The basis of a layer that is merged as what is no layer."""

NETWORK = "network"
"""The objective that is the whole network's output."""


@dataclass(frozen=True, kw_only=True)
class Calibrated(Linear):
    """A method that needs each expert's calibration data, and averages what is no linear layer."""

    calibrated: bool = True

    def check(self, settings: Settings) -> None:
        """Weights must not be all zero, and counts must be whole.

        Raises:
            MethodError: naming the parameter.
        """
        if not any(numbers(settings, "weight")):
            raise MethodError(
                "the weights of all models are 0", "Give at least one model a weight above 0."
            )
        for name in ("group", "directions", "sweeps"):
            value = settings.shared.get(name)
            if value is not None and float(value) % 1:
                raise MethodError(f"{name} must be a whole number, not {value:g}")

    def weighted_sum(self, settings: Settings) -> WeightedSum:
        """The mean, of tensors that are no linear layers."""
        weights = numbers(settings, "weight")
        return WeightedSum(tuple(weights), divisor(weights, normalize=True))


WEIGHT = Parameter(
    "weight",
    float,
    Scope.EXPERT,
    "How much an input of this expert's task counts, and the expert in the mean of the rest.",
    default=1.0,
    minimum=0.0,
)
KEEP = Parameter(
    "keep",
    float,
    Scope.GLOBAL,
    "Factor on what is off the diagonal of the inputs' second moments.",
    default=0.9,
    minimum=0.0,
    maximum=1.0,
)
_REST = (
    " Norms, embeddings and all else that is no linear layer of the network is averaged. Every model needs "
    "`calibration:`, some examples of its task, without labels."
)

PROJECTION = Calibrated(
    name="projection",
    summary="The merge whose linear layers' outputs are nearest to the experts', on calibration data.",
    reference="Model Merging by Output-Space Projection, arXiv 2605.29101",
    explanation=(
        "Finds, layer by layer, the coefficients of the task vectors with which the merged layer answers "
        "most nearly as each expert does on its own examples: a convex quadratic programme, solved and "
        "certified. Task arithmetic and soups are points of it, TIES and DARE too with basis: elementwise. "
        "With sequential: true the inputs of each layer are those that the layers merged before it produce. "
        "projection.json in the output tells the share of the error that each layer captures."
        + _REST
    ),
    parameters=(
        WEIGHT,
        Parameter(
            "basis",
            str,
            Scope.GLOBAL,
            "A coefficient for each expert and layer (scalar), output row (diagonal), input column "
            "(columns), entry (elementwise); or all weights of the layer (optimal); none averages the layer. "
            "With objective: network one for each expert (scalar), and block (blocks), and attention, MLP "
            "and rest of a block (modules).",
            default="diagonal",
            choices=(
                "scalar",
                "diagonal",
                "columns",
                "elementwise",
                "optimal",
                NONE,
                "blocks",
                "modules",
            ),
        ),
        Parameter(
            "objective",
            str,
            Scope.GLOBAL,
            "Whose outputs shall be near the experts': each linear layer's, or the network's last hidden "
            "states, with all models in memory.",
            default="layer",
            choices=("layer", NETWORK),
        ),
        Parameter(
            "constraint",
            str,
            Scope.GLOBAL,
            "What coefficients may be; box is from 0 to `upper`, a simplex sums to one.",
            default="free",
            choices=("free", "non_negative", "box", "simplex"),
        ),
        Parameter(
            "ridge",
            float,
            Scope.GLOBAL,
            "Pulls coefficients towards 0, the base: a share of the mean curvature.",
            default=0.0,
            minimum=0.0,
        ),
        Parameter(
            "sequential",
            bool,
            Scope.GLOBAL,
            "Whether inputs are computed anew with what is merged before each layer.",
            default=True,
        ),
        Parameter(
            "upper",
            float,
            Scope.GLOBAL,
            "Upper bound of the box.",
            default=1.0,
            minimum=0.0,
            open_minimum=True,
        ),
        Parameter(
            "group",
            float,
            Scope.GLOBAL,
            "Output rows that share coefficients with basis: diagonal, such as the size of a head.",
            default=1.0,
            minimum=1.0,
        ),
        Parameter(
            "directions",
            float,
            Scope.GLOBAL,
            "With basis: optimal, the rank of each layer's correction; all if not given.",
            minimum=1.0,
        ),
        Parameter(
            "sweeps",
            float,
            Scope.GLOBAL,
            "With objective: network, how often it is linearised at most.",
            default=3.0,
            minimum=1.0,
        ),
    ),
    base=BaseUse.REQUIRED,
    propagates=True,
    spaces=("core",),
    adds_ranks=True,
    gauge=(
        "The merged adapter does not depend on the factorisation: updates are scaled as matrices."
    ),
)

REGMEAN = Calibrated(
    name="regmean",
    summary="Least squares between the experts' linear layers, each on its own inputs.",
    reference="RegMean: Jin et al. 2023, arXiv 2212.09849, equation 2",
    explanation=(
        "The weights whose outputs are nearest to each expert's on that expert's inputs, in closed form "
        "from the inputs' second moments. `keep` below 1 scales what is off their diagonal, as the paper "
        "advises. With keep: 1 it is projection with basis: optimal and sequential: false." + _REST
    ),
    parameters=(WEIGHT, KEEP),
    base=BaseUse.REQUIRED,
    propagates=True,
)

REGMEAN_PLUS_PLUS = Calibrated(
    name="regmean++",
    summary="RegMean on the inputs that the layers merged before produce.",
    reference="Dang et al. 2025, RegMean++: Enhancing Effectiveness and Generalization of Regression Mean",
    explanation=(
        "As regmean, but the inputs of each layer are computed by the network as merged so far, from the "
        "first layer to the last." + _REST
    ),
    parameters=(WEIGHT, KEEP),
    base=BaseUse.REQUIRED,
    propagates=True,
)

FISHER = Calibrated(
    name="fisher",
    summary="The mean of the experts, weighted by how much each layer's outputs depend on a weight.",
    reference="Matena and Raffel 2022, arXiv 2111.09832, equation 2",
    explanation=(
        "Weights each expert's parameters by its Fisher information. As loss serves the squared error of "
        "the layer's own outputs, for which no labels are needed: the information of a weight is the mean "
        "square of its input (form: diagonal), or that of a layer the second moments of its inputs "
        "(kronecker)." + _REST
    ),
    parameters=(
        WEIGHT,
        Parameter(
            "form",
            str,
            Scope.GLOBAL,
            "Of the Fisher matrix.",
            default="diagonal",
            choices=("diagonal", "kronecker"),
        ),
        Parameter(
            "damping",
            float,
            Scope.GLOBAL,
            "Of form: kronecker: what is added, as a share of the mean eigenvalue.",
            default=1e-3,
            minimum=0.0,
            open_minimum=True,
        ),
    ),
    base=BaseUse.REQUIRED,
    propagates=True,
)
