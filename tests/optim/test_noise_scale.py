"""The effective noise scale, and the equilibrium of scale-invariant weights against simulations."""

from __future__ import annotations

import math

import pytest
import torch

from isthmus.errors import TrainingError
from isthmus.optim.noise_scale import (
    adaptive_noise_scale,
    effective_learning_rate,
    effective_noise_scale,
    equilibrium,
)


def test_formula():
    assert effective_noise_scale(0.1, 50) == pytest.approx(0.002)
    assert effective_noise_scale(0.1, 50, 0.9) == pytest.approx(0.02)
    assert effective_noise_scale(0.1, 50, 0.9, weight_decay=0.1) == pytest.approx(0.02)
    invariant = effective_noise_scale(0.1, 50, 0.9, scale_invariant=True, squared_norm=4.0)
    assert invariant == pytest.approx(0.005)
    assert adaptive_noise_scale(0.1, 25) == pytest.approx(0.02)


def test_without_momentum_the_equilibrium_rate_is_root_two_eta_lambda():
    settled = equilibrium(1e-3, 1e-3, squared_gradient=9.0)
    assert settled.effective_lr == pytest.approx(math.sqrt(2e-6) / 3, rel=1e-6)
    assert settled.angle == pytest.approx(math.sqrt(2e-6), rel=1e-6)
    scale = effective_noise_scale(1e-3, 8, weight_decay=1e-3, scale_invariant=True)
    assert scale == pytest.approx(math.sqrt(2e-6) / 8, rel=1e-6)


def test_decoupled_and_coupled_decay_agree_without_momentum():
    one, other = equilibrium(0.1, 0.3), equilibrium(0.1, 0.3, decoupled=True)
    assert one.squared_norm == pytest.approx(other.squared_norm)
    assert one.angle == pytest.approx(other.angle)


def test_diffusion_is_what_the_noise_scale_says():
    """White noise through momentum: the stationary variance of a quadratic, η·trΣ/(2B(1 − μ)h)."""
    lr, momentum, batch, curvature, chains = 0.02, 0.8, 4, 0.5, 20000
    draw = torch.Generator().manual_seed(0)
    x = torch.zeros(chains, dtype=torch.float64)
    m = torch.zeros_like(x)
    for _ in range(1500):
        noise = torch.randn(chains, generator=draw, dtype=torch.float64) / math.sqrt(batch)
        m = momentum * m + curvature * x + noise
        x = x - lr * m
    expected = effective_noise_scale(lr, batch, momentum) / (2 * curvature)
    # 20,000 chains give the variance to 1%; the formula is to leading order in the rate.
    assert float(x.var()) == pytest.approx(expected, rel=0.04)


def simulate(lr, decay, momentum, decoupled, gradient, steps, width=400):
    """torch's SGD on a loss of w/‖w‖: ‖w‖², ‖g̃‖² and cos θ, each averaged over the second half."""
    draw = torch.Generator().manual_seed(1)
    w = torch.randn(width, generator=draw, dtype=torch.float64).requires_grad_()
    with torch.no_grad():
        start = equilibrium(lr, decay, momentum, decoupled=decoupled, squared_gradient=width)
        w *= 1.3 * math.sqrt(start.squared_norm) / w.norm()
    optimizer = torch.optim.SGD(
        [w], lr, momentum=momentum, weight_decay=0.0 if decoupled else decay
    )
    norms, gradients, cosines = [], [], []
    for step in range(steps):
        optimizer.zero_grad()
        gradient(w / w.norm(), draw).backward()
        before = w.detach().clone()
        if step >= steps // 2:
            gradients.append(float(w.grad.square().sum() * before.square().sum()))
        optimizer.step()
        if decoupled:
            with torch.no_grad():
                w -= lr * decay * before
        if step >= steps // 2:
            norms.append(float(w.detach().square().sum()))
            cosines.append(float(torch.cosine_similarity(before, w.detach(), dim=0)))
    return (sum(values) / len(values) for values in (norms, gradients, cosines))


def noise(direction, draw):
    return direction @ torch.randn(len(direction), generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("decoupled", [False, True])
def test_equilibrium_of_noise_against_a_simulation(momentum, decoupled):
    lr, decay = 0.1, 0.05
    norm, gradient, cosine = simulate(lr, decay, momentum, decoupled, noise, 3000)
    # The average of ‖g̃‖² is known, width − 1, and tells whether the simulation is right.
    assert gradient == pytest.approx(399, rel=0.02)
    settled = equilibrium(lr, decay, momentum, decoupled=decoupled, squared_gradient=gradient)
    assert norm == pytest.approx(settled.squared_norm, rel=0.02)
    assert math.acos(cosine) == pytest.approx(settled.angle, rel=0.02)
    measured = effective_learning_rate(lr, norm, momentum)
    assert measured == pytest.approx(settled.effective_lr, rel=0.02)


def test_equilibrium_of_a_regression_with_signal():
    """Labels by a direction that w/‖w‖ must find: gradients are not noise alone."""
    goal = torch.nn.functional.normalize(
        torch.randn(20, generator=torch.Generator().manual_seed(5), dtype=torch.float64), dim=0
    )

    def regression(direction, draw):
        inputs = torch.randn(8, 20, generator=draw, dtype=torch.float64)
        noisy = inputs @ goal + 0.5 * torch.randn(8, generator=draw, dtype=torch.float64)
        return (inputs @ direction - noisy).square().mean() / 2

    lr, decay = 0.05, 0.1
    norm, gradient, _ = simulate(lr, decay, 0.0, False, regression, 8000, width=20)
    settled = equilibrium(lr, decay, squared_gradient=gradient)
    assert norm == pytest.approx(settled.squared_norm, rel=0.05)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": -0.1, "batch_size": 1}, "learning rate is -0.1"),
        ({"lr": math.nan, "batch_size": 1}, "learning rate is nan"),
        ({"lr": 0.1, "batch_size": 0}, "batch size is 0"),
        ({"lr": 0.1, "batch_size": 2.5}, "batch size is 2.5"),
        ({"lr": 0.1, "batch_size": 1, "momentum": 1.0}, "momentum is 1.0"),
        ({"lr": 0.1, "batch_size": 1, "momentum": -0.1}, "momentum is -0.1"),
        ({"lr": 0.1, "batch_size": 1, "weight_decay": -1.0}, "weight decay is -1.0"),
        ({"lr": 0.1, "batch_size": 1, "scale_invariant": True}, "grows for ever"),
        (
            {"lr": 0.1, "batch_size": 1, "scale_invariant": True, "squared_norm": 0.0},
            "squared norm of scale-invariant weights is 0",
        ),
    ],
)
def test_settings_out_of_range(given, message):
    with pytest.raises(TrainingError, match=message):
        effective_noise_scale(**given)


def test_no_equilibrium():
    for given in ((0.0, 0.1), (0.1, 0.0), (2.0, 0.5)):
        with pytest.raises(TrainingError, match="no equilibrium"):
            equilibrium(*given)
    with pytest.raises(TrainingError, match="no equilibrium"):
        equilibrium(0.1, 0.1, squared_gradient=0.0)
    with pytest.raises(TrainingError, match="batch size is 0"):
        adaptive_noise_scale(0.1, 0)
