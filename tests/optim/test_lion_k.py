"""The Lion-K family, step by step and at its limit points."""

from __future__ import annotations

import copy
import math
import shutil

import cvxpy
import pytest
import torch
from torch import nn

from isthmus.errors import TrainingError
from isthmus.optim.lion_k import Lion, LionK, Muon, NormalizedGD, Signum
from isthmus.optim.saturation import optimizer_saturations

DECAY, RATE = 0.3, 0.05


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def run(optimizer, parameter, gradients):
    """The parameter after every step."""
    path = []
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        path.append(parameter.detach().clone())
    return path


def lion(x, gradients):
    m = torch.zeros_like(x)
    for g in gradients:
        update = torch.sign(0.9 * m + 0.1 * g)
        x = x - RATE * (update + DECAY * x)
        m = 0.99 * m + 0.01 * g
        yield x


def signum(x, gradients):
    m = torch.zeros_like(x)
    for g in gradients:
        m = 0.8 * m + 0.2 * g
        x = x - RATE * (torch.sign(m) + DECAY * x)
        yield x


def normalized(x, gradients):
    m = torch.zeros_like(x)
    for g in gradients:
        m = 0.8 * m + 0.2 * g
        x = x - RATE * (m / m.square().sum().sqrt() + DECAY * x)
        yield x


def exact_muon(x, gradients):
    m = torch.zeros_like(x)
    for g in gradients:
        m = 0.8 * m + 0.2 * g
        nesterov = 0.8 * m + 0.2 * g
        # UVᵀ = (XXᵀ)^(-1/2) X, another way than a singular value decomposition.
        values, vectors = torch.linalg.eigh(nesterov @ nesterov.mT)
        polar = vectors @ (values.rsqrt().unsqueeze(1) * vectors.mT) @ nesterov
        x = x - RATE * polar - RATE * DECAY * x
        yield x


@pytest.mark.parametrize(
    ("reference", "make"),
    [
        (lion, lambda p: Lion(p, RATE, weight_decay=DECAY)),
        (signum, lambda p: Signum(p, RATE, momentum=0.8, weight_decay=DECAY)),
        (normalized, lambda p: NormalizedGD(p, RATE, momentum=0.8, weight_decay=DECAY)),
        (
            exact_muon,
            lambda p: Muon(p, RATE, momentum=0.8, weight_decay=DECAY, polar="svd", adjust="none"),
        ),
    ],
)
def test_step_by_step_against_the_definition(reference, make):
    start, gradients = normal(4, 7), list(normal(25, 4, 7, seed=1))
    parameter = nn.Parameter(start.clone())
    path = run(make([parameter]), parameter, gradients)
    for step, expected in zip(path, reference(start, gradients), strict=True):
        assert torch.allclose(step, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (16, 16)])
@pytest.mark.parametrize(
    ("adjust", "theirs"), [("original", "original"), ("match_rms", "match_rms_adamw")]
)
def test_muon_is_torchs_muon_bit_by_bit(nesterov, shape, adjust, theirs):
    start = normal(*shape, dtype=torch.float32)
    gradients = list(normal(30, *shape, seed=1, dtype=torch.float32))
    ours, peer = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    settings = {"lr": 0.1, "nesterov": nesterov, "weight_decay": 0.3}
    path = run(Muon([ours], adjust=adjust, **settings), ours, gradients)
    expected = run(torch.optim.Muon([peer], adjust_lr_fn=theirs, **settings), peer, gradients)
    assert all(torch.equal(one, other) for one, other in zip(path, expected, strict=True))


def test_muons_defaults_are_torchs():
    start = normal(6, 4, dtype=torch.float32)
    gradients = list(normal(5, 6, 4, seed=1, dtype=torch.float32))
    ours, peer = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    path = run(Muon([ours]), ours, gradients)
    assert torch.equal(path[-1], run(torch.optim.Muon([peer]), peer, gradients)[-1])


# Limit points. The minimum c of the quadratic ½‖A(x − c)‖² is outside of every ball.

SHAPE = (4, 3)
PROBLEM = normal(SHAPE[0], SHAPE[0], seed=3) + 2 * torch.eye(SHAPE[0], dtype=torch.float64)
OPTIMUM = 6 * normal(*SHAPE, seed=4)
LIMITS = {
    "Lion": (lambda p: Lion(p, 0.1, weight_decay=0.5), "max"),
    "Signum": (lambda p: Signum(p, 0.1, weight_decay=0.5), "max"),
    "NormalizedGD": (lambda p: NormalizedGD(p, 0.1, weight_decay=0.5), "fro"),
    "Muon": (lambda p: Muon(p, 0.1, weight_decay=0.5, polar="svd"), "op"),
    "Muon, match_rms": (
        lambda p: Muon(p, 0.1, weight_decay=0.5, polar="svd", adjust="match_rms"),
        "op",
    ),
}
NORMS = {
    "max": (lambda x: float(x.abs().max()), lambda v: cvxpy.max(cvxpy.abs(v))),
    "fro": (lambda x: float(torch.linalg.norm(x)), lambda v: cvxpy.norm(v, "fro")),
    "op": (lambda x: float(torch.linalg.matrix_norm(x, 2)), cvxpy.sigma_max),
}


def objective(x):
    return 0.5 * (PROBLEM @ (x - OPTIMUM)).square().sum()


@pytest.mark.parametrize("name", LIMITS)
def test_limit_points_solve_the_constrained_problem(name):
    make, dual = LIMITS[name]
    measure, constraint = NORMS[dual]
    parameter = nn.Parameter(2 * normal(*SHAPE, seed=5))  # outside of the ball
    optimizer = make([parameter])
    (group,) = optimizer.param_groups
    scale = {"none": 1, "original": math.sqrt(4 / 3), "match_rms": 0.4}[
        group["adjust"] if dual == "op" else "none"
    ]
    radius = scale / group["weight_decay"]
    assert measure(OPTIMUM) > 2 * radius
    for step in range(4000):
        group["lr"] = 0.1 / (1 + step / 40)
        optimizer.zero_grad()
        objective(parameter).backward()
        optimizer.step()
    found = parameter.detach()
    assert measure(found) <= radius * (1 + 1e-3)
    ((saturated,),) = optimizer_saturations(optimizer)
    assert saturated == pytest.approx(1, abs=2e-3)
    variable = cvxpy.Variable(SHAPE)
    loss = cvxpy.sum_squares(PROBLEM.numpy() @ (variable - OPTIMUM.numpy())) / 2
    cvxpy.Problem(cvxpy.Minimize(loss), [constraint(variable) <= radius]).solve(
        solver=cvxpy.CLARABEL
    )
    best = torch.from_numpy(variable.value)
    assert measure(best) == pytest.approx(radius, rel=1e-4)
    assert torch.allclose(found, best, atol=2e-2 * radius)
    assert float(objective(found)) <= float(objective(best)) * (1 + 1e-3)


@pytest.mark.parametrize("name", LIMITS)
def test_the_ball_is_never_left_and_drawn_near_from_outside(name):
    make, dual = LIMITS[name]
    measure = NORMS[dual][0]
    for start in (0.0, 20.0):
        parameter = nn.Parameter(start * normal(*SHAPE, seed=5))
        optimizer = make([parameter])
        decay = optimizer.param_groups[0]["weight_decay"]
        scale = {"Muon": math.sqrt(4 / 3), "Muon, match_rms": 0.4}.get(name, 1)
        excess = max(0.0, measure(parameter.detach()) - scale / decay)
        for gradient in normal(40, *SHAPE, seed=6):
            parameter.grad = gradient
            optimizer.step()
            excess *= 1 - 0.1 * decay
            assert measure(parameter.detach()) <= scale / decay + excess + 1e-9


def test_decay_alone_shrinks_by_one_minus_lr_decay():
    parameter = nn.Parameter(normal(3, 4))
    start = parameter.detach().clone()
    optimizer = LionK([parameter], 0.1, norm="nuclear", weight_decay=0.5)
    run(optimizer, parameter, [torch.zeros(3, 4, dtype=torch.float64)] * 7)
    assert torch.allclose(parameter.detach(), start * 0.95**7, rtol=1e-14)


def test_a_parameter_without_gradient_does_not_decay():
    parameter, other = nn.Parameter(normal(3)), nn.Parameter(normal(3, seed=1))
    start = parameter.detach().clone()
    optimizer = Lion([parameter, other], 0.1, weight_decay=0.5)
    other.grad = torch.ones(3, dtype=torch.float64)
    optimizer.step()
    assert torch.equal(parameter.detach(), start)
    assert not optimizer.state[parameter]


@pytest.mark.parametrize("norm", ["l1", "nuclear", "frobenius"])
@pytest.mark.parametrize("polar", ["svd", "newton_schulz"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_show_at_once(norm, polar, bad):
    parameter = nn.Parameter(normal(3, 4))
    optimizer = LionK([parameter], 0.1, norm=norm, polar=polar)
    gradient = normal(3, 4, seed=1)
    gradient[0, 0] = bad
    run(optimizer, parameter, [gradient])
    assert parameter.isnan().all()


def test_gradients_are_left_as_they_were():
    parameter = nn.Parameter(normal(3, 4))
    gradient = normal(3, 4, seed=1)
    run(Muon([parameter]), parameter, [gradient])
    assert torch.equal(parameter.grad, gradient)


def test_convolutions_are_flattened():
    start, gradients = normal(6, 2, 3, 3), list(normal(5, 6, 2, 3, 3, seed=1))
    parameter, flat = nn.Parameter(start.clone()), nn.Parameter(start.flatten(1))
    path = run(Muon([parameter], polar="svd"), parameter, gradients)
    expected = run(Muon([flat], polar="svd"), flat, [g.flatten(1) for g in gradients])
    assert torch.equal(path[-1].flatten(1), expected[-1])


def test_transposed_and_fused_weights_move_as_their_matrices_alone():
    matrices = [normal(rows, 4, seed=rows) for rows in (6, 2, 2)]
    gradients = [[normal(len(m), 4, seed=9 + s) for m in matrices] for s in range(5)]
    fused = nn.Parameter(torch.cat(matrices).mT.contiguous())
    optimizer = Muon([{"params": [fused], "transposed": True, "split": (6, 2, 2)}], polar="svd")
    run(optimizer, fused, [torch.cat(step).mT.contiguous() for step in gradients])
    for number, (matrix, found) in enumerate(
        zip(matrices, fused.detach().mT.split([6, 2, 2]), strict=True)
    ):
        alone = nn.Parameter(matrix.clone())
        run(Muon([alone], polar="svd"), alone, [step[number] for step in gradients])
        assert torch.allclose(found, alone.detach(), rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_comes_back_bit_by_bit(dtype, tmp_path):
    start, gradients = normal(4, 6, dtype=dtype), list(normal(10, 4, 6, seed=1, dtype=dtype))
    parameter = nn.Parameter(start.clone())
    optimizer = Muon([parameter], 0.1)
    run(optimizer, parameter, gradients[:5])
    torch.save((optimizer.state_dict(), parameter.detach()), tmp_path / "state.pt")
    state, values = torch.load(tmp_path / "state.pt")
    resumed = nn.Parameter(values.clone())
    other = LionK([resumed], norm="nuclear")
    other.load_state_dict(copy.deepcopy(state))
    momentum = optimizer.state[parameter]["momentum"]
    assert momentum.dtype == torch.float32
    assert other.state[resumed]["momentum"].dtype == torch.float32
    assert torch.equal(other.state[resumed]["momentum"], momentum)
    assert torch.equal(
        run(other, resumed, gradients[5:])[-1], run(optimizer, parameter, gradients[5:])[-1]
    )


def test_a_loaded_state_is_a_copy():
    parameter = nn.Parameter(normal(3))
    optimizer = Lion([parameter])
    run(optimizer, parameter, [normal(3, seed=1)])
    state = optimizer.state_dict()
    before = state["state"][0]["momentum"].clone()
    other = Lion([nn.Parameter(normal(3))])
    other.load_state_dict(state)
    run(other, other.param_groups[0]["params"][0], [normal(3, seed=2)])
    assert torch.equal(state["state"][0]["momentum"], before)


@pytest.mark.parametrize("norm", ["l1", "nuclear", "frobenius"])
def test_bfloat16_follows_float32(norm):
    start = normal(4, 6, dtype=torch.bfloat16)
    gradients = list(normal(10, 4, 6, seed=1, dtype=torch.bfloat16))
    half, full = nn.Parameter(start.clone()), nn.Parameter(start.float())
    run(LionK([half], 0.1, norm=norm), half, gradients)
    run(LionK([full], 0.1, norm=norm), full, [g.float() for g in gradients])
    assert half.dtype == torch.bfloat16
    assert torch.allclose(half.detach().float(), full.detach(), atol=0.05)


def test_closure_and_rate_as_a_tensor():
    parameter = nn.Parameter(normal(3))
    start = parameter.detach().clone()
    optimizer = Signum([parameter], torch.tensor(0.25))

    def closure():
        optimizer.zero_grad()
        loss = parameter.sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == pytest.approx(float(start.sum()))
    assert torch.allclose(parameter.detach(), start - 0.25)


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(
                    not any(map(shutil.which, ("g++", "clang++", "cl"))),
                    reason="torch.compile has no C++ compiler here",
                ),
            ],
        ),
    ],
)
def test_compiled_steps_are_the_same(backend):
    pair = (
        [nn.Parameter(normal(5, 3)) for _ in range(2)],
        [nn.Parameter(normal(4, seed=7)) for _ in range(2)],
    )
    optimizers = [
        LionK([{"params": [matrix], "norm": "nuclear"}, {"params": [vector]}], 0.1)
        for matrix, vector in zip(*pair, strict=True)
    ]
    torch.compiler.reset()
    steps = optimizers[0].step, torch.compile(optimizers[1].step, backend=backend)
    for number in range(4):
        for which, step in enumerate(steps):
            for seed, group in enumerate(pair):
                shape = group[which].shape
                group[which].grad = normal(*shape, seed=10 * number + seed)
            step()
    for one, other in pair:
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0"),
        ({"lr": math.nan}, "lr is nan"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"betas": (0.9, 1.0)}, "betas is"),
        ({"betas": (-0.1, 0.9)}, "betas is"),
        ({"betas": (0.5, 0.0)}, "betas is"),
        ({"norm": "l2"}, "norm is l2"),
        ({"adjust": "rms"}, "adjust is rms"),
        ({"polar": "qr"}, "polar is qr"),
        ({"newton_schulz_steps": 0}, "newton_schulz_steps is 0"),
    ],
)
def test_settings_out_of_range(changes, message):
    with pytest.raises(TrainingError, match=message):
        LionK([nn.Parameter(torch.zeros(3))], **changes)


def test_momentum_of_one_is_refused():
    for make in (Signum, NormalizedGD, Muon):
        with pytest.raises(TrainingError, match="betas"):
            make([nn.Parameter(torch.zeros(3, 3))], momentum=1.0)


def test_a_bad_group_is_not_added():
    optimizer = Muon([nn.Parameter(torch.zeros(3, 3))])
    with pytest.raises(TrainingError, match="is no matrix"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TrainingError, match="sparse gradient"):
        Lion(table.parameters()).step()


def test_complex_parameters_are_refused():
    with pytest.raises(TrainingError, match="complex64"):
        Lion([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
