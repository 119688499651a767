"""The Lion-K family: one optimizer for every norm K."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from isthmus.errors import TrainingError
from isthmus.optim.gradient_maps import (
    ADJUSTS,
    NORMS,
    POLARS,
    Adjust,
    Norm,
    Polar,
    matrix_blocks,
    polar_factor,
    sign,
    unit,
    update_scale,
)


class LionK(Optimizer):
    """Momentum through the gradient of a norm K, with decoupled weight decay.

    For the gradient g and the momentum m, which starts at 0,

        m⁺ = β₂m + (1 − β₂)g
        x⁺ = (1 − ηλ)x − ηs·∇K(β₁m + (1 − β₁)g)

    (Chen et al. 2023, Lion secretly solves constrained optimization, arXiv 2310.05898; for the nuclear norm
    Chen, Li and Liu 2025, arXiv 2506.15054). Every ∇K has dual norm at most 1, so once ‖x‖ ≤ s/λ in the dual
    norm it stays so, and from outside the excess shrinks by 1 − ηλ a step:

    | norm | ∇K | ball | with β₁ = β₂ |
    |---|---|---|---|
    | l1 | sign | ‖x‖_∞ ≤ 1/λ | Signum |
    | nuclear | UVᵀ | ‖W‖_op ≤ s/λ | Muon |
    | frobenius | m/‖m‖ | ‖x‖_F ≤ 1/λ | normalised gradient descent with momentum |

    Muon's Nesterov momentum μ is (β₁, β₂) = (μ², μ).

    A parameter without gradient is left alone, decay included. NaN or infinity in a gradient makes the whole
    parameter NaN at that step, under every norm, so that the next loss shows it. Momentum is kept in float32 for
    parameters of less precision; steps below their resolution are lost in the parameter itself.

    Args:
        params: Parameters or groups. Every setting below may differ by group, and so may `transposed` and
            `split` of `matrix_blocks`, which the nuclear norm heeds.
        lr: η.
        norm: K. The nuclear norm takes parameters of two dimensions and more, and flattens a convolution to
            [out, in·kh·kw]; the Frobenius norm is over one parameter.
        betas: (β₁, β₂), both in [0, 1); β₁ = 0 if β₂ = 0.
        weight_decay: λ, times the unscaled η.
        adjust: s for the nuclear norm, see `update_scale`; other norms have s = 1.
        polar: How UVᵀ is found, see `polar_factor`.
        newton_schulz_steps: See `polar_factor`.
        newton_schulz_dtype: See `polar_factor`.

    Raises:
        TrainingError: settings out of range, complex parameters, parameters that are no matrices with the
            nuclear norm; in `step` sparse gradients.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        norm: Norm = "l1",
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        adjust: Adjust = "none",
        polar: Polar = "svd",
        newton_schulz_steps: int = 5,
        newton_schulz_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        defaults = {
            "lr": lr,
            "norm": norm,
            "betas": betas,
            "weight_decay": weight_decay,
            "adjust": adjust,
            "polar": polar,
            "newton_schulz_steps": newton_schulz_steps,
            "newton_schulz_dtype": newton_schulz_dtype,
            "transposed": False,
            "split": None,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, its settings checked.

        Raises:
            TrainingError: as the class does.
        """
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except TrainingError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave; the momentum comes back bit by bit."""
        super().load_state_dict(state_dict)
        # torch casts a state to its parameter's type; the momentum of a bfloat16 parameter is float32.
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            if key in state_dict["state"]:
                saved = state_dict["state"][key]["momentum"]
                self.state[parameter]["momentum"] = saved.to(parameter.device, copy=True)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move every parameter that has a gradient.

        Args:
            closure: Evaluates the loss anew and returns it.

        Raises:
            TrainingError: a sparse gradient.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group)
        return loss

    def _move(self, parameter: Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.layout != torch.strided:
            raise TrainingError(
                f"a parameter of shape {list(parameter.shape)} has a sparse gradient, which has no norm to "
                "follow",
                "build its embedding with sparse=False",
            )
        state = self.state[parameter]
        if "momentum" not in state:
            kept = torch.promote_types(parameter.dtype, torch.float32)
            state["momentum"] = torch.zeros_like(parameter, dtype=kept)
        momentum = state["momentum"]
        gradient = gradient.to(momentum.dtype)
        first, second = group["betas"]
        momentum.lerp_(gradient, 1 - second)
        # The blend β₁m + (1 − β₁)g from the new momentum: the order in which torch's Muon rounds.
        blend = gradient.lerp(momentum, first / second) if second else gradient
        rate = float(group["lr"])
        parameter.mul_(1 - rate * group["weight_decay"])
        if group["norm"] != "nuclear":
            direction = sign(blend) if group["norm"] == "l1" else unit(blend)
            parameter.add_(direction, alpha=-rate)
            return
        form = (group["transposed"], group["split"])
        for target, block in zip(
            matrix_blocks(parameter, *form), matrix_blocks(blend, *form), strict=True
        ):
            matrix = block.flatten(1)
            direction = polar_factor(
                matrix, group["polar"], group["newton_schulz_steps"], group["newton_schulz_dtype"]
            )
            scale = update_scale(matrix.shape, group["adjust"])
            target.add_(direction.reshape(target.shape), alpha=-rate * scale)


class Lion(LionK):
    """Lion (Chen et al. 2023, Symbolic discovery of optimization algorithms, arXiv 2302.06675)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr, norm="l1", betas=betas, weight_decay=weight_decay)


class Signum(LionK):
    """The sign of the momentum (Bernstein et al. 2018, signSGD, arXiv 1802.04434)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        betas = (momentum, momentum)
        super().__init__(params, lr, norm="l1", betas=betas, weight_decay=weight_decay)


class NormalizedGD(LionK):
    """Normalised gradient descent with momentum, each parameter by its own norm."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
    ) -> None:
        betas = (momentum, momentum)
        super().__init__(params, lr, norm="frobenius", betas=betas, weight_decay=weight_decay)


class Muon(LionK):
    """Muon (Jordan et al. 2024).

    Its defaults are those of `torch.optim.Muon`, which it equals bit by bit on float32.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adjust: Adjust = "original",
        polar: Polar = "newton_schulz",
        newton_schulz_steps: int = 5,
        newton_schulz_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(
            params,
            lr,
            norm="nuclear",
            betas=(momentum**2 if nesterov else momentum, momentum),
            weight_decay=weight_decay,
            adjust=adjust,
            polar=polar,
            newton_schulz_steps=newton_schulz_steps,
            newton_schulz_dtype=newton_schulz_dtype,
        )


def _check(group: dict[str, Any]) -> None:
    for setting, known in (("norm", NORMS), ("adjust", ADJUSTS), ("polar", POLARS)):
        _require(group[setting] in known, setting, group[setting], f"one of {', '.join(known)}")
    rate = float(group["lr"])
    _require(0 <= rate < float("inf"), "lr", rate, "0 or positive")
    decay = group["weight_decay"]
    _require(0 <= decay < float("inf"), "weight_decay", decay, "0 or positive")
    first, second = group["betas"]
    fits = 0 <= first < 1 and 0 <= second < 1 and (second > 0 or first == 0)
    _require(fits, "betas", (first, second), "in [0, 1), and β₁ = 0 where β₂ = 0")
    steps = group["newton_schulz_steps"]
    _require(steps >= 1, "newton_schulz_steps", steps, "at least 1")
    _check_parameters(group["params"], group)


def _check_parameters(parameters: Iterable[Tensor], group: dict[str, Any]) -> None:
    for parameter in parameters:
        if not parameter.is_floating_point():
            raise TrainingError(
                f"a parameter of shape {list(parameter.shape)} is of type {parameter.dtype}",
                "train real and imaginary parts as parameters of their own",
            )
        if group["norm"] == "nuclear":
            matrix_blocks(parameter, group["transposed"], group["split"])


def _require(fits: bool, setting: str, value: object, allowed: str) -> None:
    if not fits:
        raise TrainingError(f"{setting} is {value}", f"it must be {allowed}")
