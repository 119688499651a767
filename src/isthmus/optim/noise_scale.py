"""The noise that training settings imply: learning rate over batch size, and what decay makes of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus.errors import TrainingError


def effective_noise_scale(
    lr: float,
    batch_size: int,
    momentum: float = 0.0,
    *,
    weight_decay: float | None = None,
    scale_invariant: bool = False,
    decoupled: bool = False,
    squared_norm: float | None = None,
    squared_gradient: float = 1.0,
) -> float:
    """η/(B(1 − μ)) for gradient descent with momentum; η/(B(1 − μ)‖w‖²) where the network ignores ‖w‖.

    To leading order in η this sets the stationary covariance and the diffusion of the weights: with Σ the
    covariance of one example's gradient, weights diffuse as by white noise of covariance
    η/(B(1 − μ))·Σ for every unit of the time t = (steps)·η/(1 − μ) (Smith and Le 2018, arXiv 1710.06451, who
    multiply it by the size of the data set; Smith et al. 2018, arXiv 1711.00489, with
    momentum). Zhang et al. (arXiv 2510.04686) find the gain of merging to depend on it.

    For weights in front of a normalisation layer only the direction w/‖w‖ matters, which moves at the rate
    η/‖w‖² (van Laarhoven 2017, arXiv 1706.05350). Pass the measured ‖w‖², or the decay, for the value that
    ‖w‖² settles at (`equilibrium`).

    Not for Adam, Lion or Muon, whose steps do not grow with the gradient; see `adaptive_noise_scale`.

    Args:
        lr: η, of the optimizer of torch: momentum sums gradients, without dampening.
        batch_size: B, examples of one step over all devices and accumulated micro-batches.
        momentum: μ.
        weight_decay: λ; heeded for scale-invariant weights alone, where it sets the norm.
        scale_invariant: The loss does not change with ‖w‖.
        decoupled: See `equilibrium`.
        squared_norm: ‖w‖², measured. It takes the place of the equilibrium.
        squared_gradient: See `equilibrium`. Where it is left at 1, values for different batch sizes differ
            from the truth by a factor: E‖g‖² is about trΣ/B in noise.

    Returns:
        In units of the learning rate, for one example; for scale-invariant weights in those of η/‖w‖².

    Raises:
        TrainingError: a setting out of range, or scale-invariant weights without decay and norm.
    """
    _require_settings(lr, momentum, weight_decay or 0.0)
    _require_batch(batch_size)
    if not scale_invariant:
        return lr / (batch_size * (1 - momentum))
    if squared_norm is not None:
        return effective_learning_rate(lr, squared_norm, momentum) / batch_size
    if not weight_decay:
        raise TrainingError(
            "without weight decay the norm of scale-invariant weights grows for ever, and their noise scale "
            "has no limit",
            "give squared_norm, the measured ‖w‖², or a positive weight_decay",
        )
    settled = equilibrium(
        lr,
        weight_decay,
        momentum,
        decoupled=decoupled,
        squared_gradient=squared_gradient,
    )
    return settled.effective_lr / batch_size


def adaptive_noise_scale(lr: float, batch_size: int) -> float:
    """η/√B, which stands for the noise of Adam and its kin where gradients are mostly noise.

    Their steps have the size η whatever the gradient's, so that it is η/√B, and not η/B, that two batch
    sizes must share to diffuse alike (Malladi et al. 2022, arXiv 2205.10287, the square-root scaling rule;
    it asks that 1 − β₁ and 1 − β₂ grow as B too). It is not comparable with `effective_noise_scale`.

    Args:
        lr: η.
        batch_size: B.

    Raises:
        TrainingError: a setting out of range.
    """
    _require_settings(lr, 0.0, 0.0)
    _require_batch(batch_size)
    return lr / math.sqrt(batch_size)


def effective_learning_rate(lr: float, squared_norm: float, momentum: float = 0.0) -> float:
    """η/((1 − μ)‖w‖²), at which the direction of scale-invariant weights moves.

    Args:
        lr: η.
        squared_norm: ‖w‖² as measured: of all weights that share a normalisation, such as a channel's or a
            layer's.
        momentum: μ.

    Raises:
        TrainingError: a setting out of range.
    """
    _require_settings(lr, momentum, 0.0)
    if not 0 < squared_norm < math.inf:
        raise TrainingError(
            f"the squared norm of scale-invariant weights is {squared_norm}",
            "it must be positive: weights of norm 0 have no direction",
        )
    return lr / ((1 - momentum) * squared_norm)


@dataclass(frozen=True)
class Equilibrium:
    """Where decay and the growth of scale-invariant weights balance.

    Attributes:
        squared_norm: ‖w‖².
        effective_lr: η/((1 − μ)‖w‖²).
        angle: Between the weights before and after a step, in radians.
    """

    squared_norm: float
    effective_lr: float
    angle: float


def equilibrium(
    lr: float,
    weight_decay: float,
    momentum: float = 0.0,
    *,
    decoupled: bool = False,
    squared_gradient: float = 1.0,
) -> Equilibrium:
    """Norm, rate and rotation that gradient descent settles at on scale-invariant weights.

    Their gradient is orthogonal to w and is g = g̃/‖w‖, where g̃ is taken at w/‖w‖. A step without momentum
    thus gives ‖w‖² ← (1 − ηλ)²‖w‖² + η²‖g̃‖²/‖w‖², and at rest

        ‖w‖⁴ = η‖g̃‖²/(λ(2 − ηλ)),   η/‖w‖² = √(ηλ(2 − ηλ))/‖g̃‖ ≈ √(2ηλ)/‖g̃‖.

    With momentum the second moments of (w, m) are a linear recursion. At rest, for gradients that do not
    depend on those before,

        decay in the gradient: ‖w‖⁴ = η‖g̃‖²/(λ(1 − μ)(2 − ηλ/(1 + μ))),   cos θ = 1 − ηλ/(1 + μ)
        decoupled, κ = 1 − ηλ: ‖w‖⁴ = η²‖g̃‖²(1 + κμ)/((1 − κ²)(1 − μ²)(1 − κμ)),   cos θ = (κ + μ)/(1 + κμ)

    The first agrees with Wan et al. 2021 (arXiv 2006.08419) and gives θ ≈ √(2ηλ/(1 + μ)); see also Kosson
    et al. 2024 (arXiv 2305.17212). It takes about 1/(4ηλ) steps to get there, without momentum. Where
    gradients of successive steps agree, momentum adds them up and ‖w‖ is larger than this.

    Args:
        lr: η.
        weight_decay: λ.
        momentum: μ.
        decoupled: Decay w ← (1 − ηλ)w beside the step, as AdamW does it; if False, λw is part of the
            gradient and passes through the momentum, as in `torch.optim.SGD`.
        squared_gradient: E‖g̃‖² = E‖g‖²‖w‖² of a batch's gradient. At 1 the effective rate is in units of
            1/‖g̃‖ and ‖w‖² in units of ‖g̃‖.

    Raises:
        TrainingError: a setting out of range; learning rate, decay or gradient 0, for which there is no
            equilibrium.
    """
    _require_settings(lr, momentum, weight_decay)
    shrinkage = lr * weight_decay
    if not 0 < shrinkage < 1 or not 0 < squared_gradient < math.inf:
        raise TrainingError(
            f"there is no equilibrium for lr·weight_decay = {shrinkage} and a squared gradient of "
            f"{squared_gradient}",
            "lr·weight_decay must lie between 0 and 1, the gradient be positive",
        )
    if decoupled:
        kept = 1 - shrinkage
        fourth = (lr**2 * squared_gradient * (1 + kept * momentum)) / (
            (1 - kept**2) * (1 - momentum**2) * (1 - kept * momentum)
        )
        # 1 − cos θ, so that a small angle keeps its digits.
        versine = (1 - kept) * (1 - momentum) / (1 + kept * momentum)
    else:
        versine = shrinkage / (1 + momentum)
        fourth = lr * squared_gradient / (weight_decay * (1 - momentum) * (2 - versine))
    squared_norm = math.sqrt(fourth)
    return Equilibrium(
        squared_norm,
        effective_learning_rate(lr, squared_norm, momentum),
        2 * math.asin(math.sqrt(versine / 2)),
    )


def _require_settings(lr: float, momentum: float, weight_decay: float) -> None:
    for name, value, allowed, fits in (
        ("the learning rate", lr, "0 or positive", 0 <= lr < math.inf),
        ("momentum", momentum, "at least 0 and below 1", 0 <= momentum < 1),
        ("weight decay", weight_decay, "0 or positive", 0 <= weight_decay < math.inf),
    ):
        if not fits:
            raise TrainingError(f"{name} is {value}", f"it must be {allowed}")


def _require_batch(batch_size: int) -> None:
    if batch_size < 1 or batch_size != int(batch_size):
        raise TrainingError(
            f"the batch size is {batch_size}", "it must be a whole number of examples, at least 1"
        )
