"""How near a parameter is to the boundary of the ball that its optimizer keeps it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.errors import TrainingError
from isthmus.optim.gradient_maps import NORMS, Adjust, Norm, matrix_blocks, update_scale
from isthmus.optim.lion_k import LionK


@dataclass(frozen=True)
class Saturation:
    """A parameter against the balls of three families of optimizers; 1 is the boundary, for s = 1.

    Attributes:
        max_norm: λ‖W‖_∞: AdamW, Lion, Signum.
        operator: λ‖W‖_op: Muon; None where the parameter is no matrix.
        frobenius: λ‖W‖_F: normalised gradient descent.
    """

    max_norm: float
    operator: float | None
    frobenius: float


def saturation(
    parameter: Tensor,
    weight_decay: float,
    norm: Norm,
    *,
    adjust: Adjust = "none",
    transposed: bool = False,
    split: Sequence[int] | None = None,
) -> float:
    """λ‖W‖/s in the norm dual to K.

    Args:
        parameter: Of any shape; at least two dimensions for the nuclear norm.
        weight_decay: λ.
        norm: K of the optimizer: `l1` gives λ‖W‖_∞, `nuclear` λ‖W‖_op, `frobenius` λ‖W‖_F.
        adjust: The optimizer's update scale.
        transposed: See `matrix_blocks`.
        split: See `matrix_blocks`; the most saturated block counts.

    Raises:
        TrainingError: an unknown norm, a negative decay, no matrix where one is needed, NaN or infinity.
    """
    if norm not in NORMS:
        raise TrainingError(f"norm is {norm}", f"it must be one of {', '.join(NORMS)}")
    if not weight_decay >= 0:
        raise TrainingError(f"weight_decay is {weight_decay}", "it must be 0 or positive")
    values = parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))
    if not values.isfinite().all():
        raise TrainingError(
            f"a parameter of shape {list(parameter.shape)} holds NaN or infinity",
            "training has diverged; take an earlier checkpoint",
        )
    if norm == "l1":
        return weight_decay * float(values.abs().max())
    if norm == "frobenius":
        return weight_decay * float(torch.linalg.vector_norm(values))
    matrices = [block.flatten(1) for block in matrix_blocks(values, transposed, split)]
    return weight_decay * max(
        float(torch.linalg.matrix_norm(matrix, 2)) / update_scale(matrix.shape, adjust)
        for matrix in matrices
    )


def saturations(parameters: Mapping[str, Tensor], weight_decay: float) -> dict[str, Saturation]:
    """All three saturations of every parameter, by name; for models of any optimizer.

    Args:
        parameters: Convolutions are flattened to [out, in·kh·kw].
        weight_decay: λ.

    Raises:
        TrainingError: as `saturation` does.
    """
    return {
        name: Saturation(
            saturation(parameter, weight_decay, "l1"),
            saturation(parameter, weight_decay, "nuclear") if parameter.ndim > 1 else None,
            saturation(parameter, weight_decay, "frobenius"),
        )
        for name, parameter in parameters.items()
    }


def optimizer_saturations(optimizer: LionK) -> list[list[float]]:
    """The saturation of every parameter in the norm of its own group, by group, in their order."""
    return [
        [
            saturation(
                parameter,
                group["weight_decay"],
                group["norm"],
                adjust=group["adjust"],
                transposed=group["transposed"],
                split=group["split"],
            )
            for parameter in group["params"]
        ]
        for group in optimizer.param_groups
    ]
