"""One layer's merge by rule: invariants, containment, and the heuristics beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import MethodError
from isthmus.projection.layer import (
    BASES,
    FisherRule,
    LayerMerge,
    ProjectionRule,
    RegMeanRule,
    merge_layer,
)
from isthmus.projection.neighbours import regmean
from isthmus.projection.objective import LayerObjective, expert_objective, sequential_objective
from isthmus.projection.statistics import InputMoments, with_constant

K, M, N = 3, 6, 8
SEEDS = (11, 12, 13)
FREE = [ProjectionRule(basis) for basis in BASES]
RULES = [*FREE, RegMeanRule(keep=1.0), FisherRule(), FisherRule(form="kronecker", damping=1e-9)]


def moments_of(x: torch.Tensor) -> InputMoments:
    found = InputMoments.empty(x.shape[-1])
    found.add(x)
    return found


def problem(seed: int = 0, count: int = 60):
    draw = torch.Generator().manual_seed(seed)
    tau = torch.randn(K, M, N, generator=draw, dtype=torch.float64)
    x = [torch.randn(count, N, generator=draw, dtype=torch.float64) for _ in range(K)]
    x = [one * torch.rand(N, generator=draw) for one in x]
    return tau, x


def run(rule, tau, moments, weights=None, seeds=SEEDS, objective=None) -> LayerMerge:
    weights = weights or (1.0,) * len(tau)
    objective = objective or expert_objective(tau, moments, weights)
    return merge_layer(rule, tau, objective, moments, weights, seeds[: len(tau)])


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_one_expert_comes_back(rule):
    tau, x = problem()
    merged = run(rule, tau[:1], [moments_of(x[0])])
    torch.testing.assert_close(merged.correction, tau[0], rtol=1e-7, atol=1e-8)
    assert merged.value <= 1e-9 * merged.initial
    assert merged.captured == pytest.approx(1)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_equal_experts_come_back(rule):
    tau, x = problem()
    same = tau[:1].expand(K, M, N)
    merged = run(rule, same, [moments_of(one) for one in x])
    torch.testing.assert_close(merged.correction, tau[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_order_of_the_experts_does_not_matter(rule):
    tau, x = problem()
    order = [2, 0, 1]
    weights = (0.2, 1.0, 0.5)
    one = run(rule, tau, [moments_of(v) for v in x], weights)
    other = run(
        rule,
        tau[order],
        [moments_of(x[i]) for i in order],
        tuple(weights[i] for i in order),
        tuple(SEEDS[i] for i in order),
    )
    torch.testing.assert_close(one.correction, other.correction, rtol=1e-7, atol=1e-8)
    assert one.heuristics == pytest.approx(other.heuristics)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**20),
    st.sampled_from(BASES[:4]),
    st.sampled_from(["free", "non_negative", "box", "simplex"]),
    st.sampled_from([1.0, 2.0]),
    st.integers(2, 30),
)
def test_no_contained_heuristic_is_better(seed, basis, constraint, upper, count):
    if constraint == "simplex" and basis not in {"scalar", "diagonal"}:
        constraint = "box"
    tau, x = problem(seed, count)
    merged = run(ProjectionRule(basis, constraint=constraint, upper=upper), tau, map_moments(x))
    wanted = {"soup"} if constraint == "simplex" else {"soup", "task arithmetic"}
    if basis == "elementwise":
        wanted |= {"TIES"} if constraint == "box" and upper == 1 else {"TIES", "DARE"}
    assert set(merged.contained) == wanted
    for name in merged.contained:
        assert merged.value <= merged.heuristics[name] + 1e-9 * merged.initial
    assert merged.floor <= merged.value + 1e-9 * merged.initial


def map_moments(x):
    return [moments_of(one) for one in x]


def test_an_expert_without_weight_is_as_good_as_absent():
    tau, x = problem()
    moments = map_moments(x)
    objective = expert_objective(tau, moments, (1.0, 0.0, 1.0))
    with_it = run(ProjectionRule(), tau, moments, (1.0, 0.0, 1.0), objective=objective)
    rest = [0, 2]
    without = run(
        ProjectionRule(), tau[rest], [moments[k] for k in rest], objective=objective, seeds=SEEDS
    )
    for name in ("soup", "TIES"):
        assert with_it.heuristics[name] == pytest.approx(without.heuristics[name])


def test_multipliers_make_the_correction():
    tau, x = problem()
    for rule in FREE[:4]:
        merged = run(rule, tau, map_moments(x))
        made = (merged.multipliers * tau).sum(dim=0)
        torch.testing.assert_close(made, merged.correction, rtol=1e-10, atol=1e-10)


def test_optimal_and_elementwise_are_regmean():
    tau, x = problem()
    expected = regmean(tau, map_moments(x))
    for rule in (ProjectionRule("optimal"), ProjectionRule("elementwise"), RegMeanRule(keep=1.0)):
        merged = run(rule, tau, map_moments(x))
        torch.testing.assert_close(merged.correction, expected, rtol=1e-6, atol=1e-7)


def test_groups_of_rows_lie_between_scalar_and_diagonal():
    tau, x = problem()
    values = [
        run(rule, tau, map_moments(x)).value
        for rule in (
            ProjectionRule("scalar"),
            ProjectionRule("diagonal", group=3),
            ProjectionRule("diagonal"),
        )
    ]
    assert values[0] > values[1] > values[2]
    whole = run(ProjectionRule("diagonal", group=M), tau, map_moments(x))
    assert whole.value == pytest.approx(values[0])


def test_directions_capture_more_and_more():
    tau, x = problem()
    found = [run(ProjectionRule("optimal", directions=r), tau, map_moments(x)) for r in (1, 3, M)]
    assert found[0].captured < found[1].captured < found[2].captured
    assert found[2].value == pytest.approx(found[2].floor)
    assert torch.linalg.matrix_rank(found[0].correction) == 1
    assert found[0].contained == ()


def test_a_large_ridge_stays_at_the_base():
    tau, x = problem()
    for basis in BASES:
        merged = run(ProjectionRule(basis, ridge=1e9), tau, map_moments(x))
        assert merged.correction.norm() < 1e-6 * tau.norm()
        assert merged.contained == ()


def test_silence_is_undetermined_and_finite():
    tau, x = problem()
    quiet = [torch.zeros_like(one) for one in x]
    for rule in RULES[:6]:
        merged = run(rule, tau, map_moments(quiet))
        assert torch.isfinite(merged.correction).all()
        assert merged.captured == 1
    assert "does not determine" in run(ProjectionRule(), tau, map_moments(quiet)).notes[0]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"constraint": "simplex", "basis": "columns"}, "simplex"),
        ({"constraint": "box", "basis": "optimal"}, "no coefficients"),
        ({"directions": 3, "basis": "diagonal"}, "belong to basis: optimal"),
    ],
)
def test_settings_that_exclude_each_other(wrong, said):
    with pytest.raises(MethodError, match=said):
        ProjectionRule(**wrong)


# The sequential objective


def naive(base, tau, x, own, delta, weights) -> float:
    """Σ ω ‖(W_0 + Δ) x − (W_0 + τ) x'‖², term by term."""
    return float(
        sum(
            w * (one @ (base + delta).mT - other @ (base + t).mT).square().sum()
            for w, t, one, other in zip(weights, tau, x, own, strict=True)
        )
    )


def sequential(seed: int = 3) -> tuple[LayerObjective, tuple]:
    tau, x = problem(seed)
    draw = torch.Generator().manual_seed(seed + 1)
    base = torch.randn(M, N, generator=draw, dtype=torch.float64)
    own = [one + 0.3 * torch.randn(one.shape, generator=draw, dtype=torch.float64) for one in x]
    weights = (1.0, 0.5, 2.0)
    cross = [o.mT @ one for o, one in zip(own, x, strict=True)]
    found = sequential_objective(base, tau, map_moments(x), cross, map_moments(own), weights)
    return found, (base, tau, x, own, weights)


def test_the_sequential_objective_is_what_it_says():
    objective, (base, tau, x, own, weights) = sequential()
    draw = torch.Generator().manual_seed(9)
    for _ in range(3):
        delta = torch.randn(M, N, generator=draw, dtype=torch.float64)
        assert objective.value(delta) == pytest.approx(naive(base, tau, x, own, delta, weights))
    assert objective.initial == pytest.approx(naive(base, tau, x, own, 0 * base, weights))


def test_sequential_regression_is_least_squares():
    objective, (base, tau, x, own, weights) = sequential()
    roots = [w**0.5 for w in weights]
    inputs = torch.cat([r * one for r, one in zip(roots, x, strict=True)])
    outputs = torch.cat([r * o @ (base + t).mT for r, o, t in zip(roots, own, tau, strict=True)])
    best = torch.linalg.lstsq(inputs, outputs).solution.mT - base
    torch.testing.assert_close(objective.regression(), best, rtol=1e-8, atol=1e-9)


def test_without_drift_it_is_the_expert_objective():
    tau, x = problem()
    base = torch.randn(M, N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    moments = map_moments(x)
    one = sequential_objective(base, tau, moments, [m.gram for m in moments], moments)
    other = expert_objective(tau, moments)
    torch.testing.assert_close(one.cross, other.cross, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one.squares, other.squares, rtol=1e-8, atol=1e-8)


def test_sequential_objectives_of_different_tasks_are_refused():
    tau, x = problem()
    moments = map_moments(x)
    with pytest.raises(MethodError, match="2"):
        sequential_objective(tau[0], tau, moments[:2], [m.gram for m in moments], moments)


def test_a_bias_is_a_last_column():
    tau, x = problem()
    wide = torch.cat([tau, torch.randn(K, M, 1, dtype=torch.float64)], dim=2)
    merged = run(ProjectionRule("optimal"), wide, [moments_of(with_constant(one)) for one in x])
    inputs = torch.cat([with_constant(one) for one in x])
    outputs = torch.cat([with_constant(one) @ t.mT for one, t in zip(x, wide, strict=True)])
    best = torch.linalg.lstsq(inputs, outputs).solution.mT
    torch.testing.assert_close(merged.correction, best, rtol=1e-8, atol=1e-9)
