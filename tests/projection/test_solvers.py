"""Solvers against Clarabel, scipy and numpy, and against the optimality conditions."""

from __future__ import annotations

import math
import warnings

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import lsq_linear

from isthmus.errors import MethodError
from isthmus.projection.conjugate import conjugate_gradients
from isthmus.projection.constraints import FREE, NON_NEGATIVE, SIMPLEX, Constraint, box
from isthmus.projection.proportioning import proportioning
from isthmus.projection.quadratic import BlockQuadratic, ProjectionWarning, Quadratic
from isthmus.projection.solution import optimality, solution
from isthmus.projection.solve import solve

CONSTRAINTS = {
    "free": FREE,
    "non-negative": NON_NEGATIVE,
    "box": box(),
    "other box": box(-0.3, 0.2),
    "simplex": SIMPLEX,
    "large simplex": Constraint(lower=0, total=2.5),
}


class Product(Quadratic):
    """A quadratic that keeps its matrices to itself."""

    def __init__(self, quadratic, diagonal=False):
        self.inner, self.known = quadratic, diagonal
        self.linear, self.constant = quadratic.linear, quadratic.constant

    def product(self, d):
        return self.inner.product(d)

    def diagonal(self):
        return self.inner.diagonal() if self.known else None


def instance(seed, blocks, n, rank=None, spread=0.0):
    """‖F d + r‖² in every block, with F, r."""
    random = np.random.default_rng(seed)
    f = random.normal(size=(blocks, rank or 2 * n, n)) * 10 ** random.uniform(-spread, 0, n)
    r = random.normal(size=(blocks, f.shape[1]))
    return f, r, quadratic(f, r)


def quadratic(f, r):
    f, r = torch.from_numpy(f), torch.from_numpy(r)
    linear = (f.mT @ r.unsqueeze(-1)).squeeze(-1)
    return BlockQuadratic(f.mT @ f, linear, r.square().sum(dim=1))


def clarabel(f, r, constraint):
    """The least ‖F d + r‖² under the constraint."""
    d = cvxpy.Variable(f.shape[1])
    limits = []
    if constraint.lower > -math.inf:
        limits.append(d >= constraint.lower)
    if constraint.upper < math.inf:
        limits.append(d <= constraint.upper)
    if constraint.total is not None:
        limits.append(cvxpy.sum(d) == constraint.total)
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.sum_squares(f @ d + r)), limits)
    problem.solve(solver=cvxpy.CLARABEL, tol_gap_rel=1e-10, tol_gap_abs=1e-10, tol_feas=1e-10)
    return problem.value, d.value


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize(
    ("n", "rank"), [(1, None), (2, None), (4, None), (4, 2), (9, None), (9, 5)]
)
def test_against_clarabel(name, n, rank):
    constraint = CONSTRAINTS[name]
    f, r, problem = instance(n, 4, n, rank)
    found = solve(problem, constraint)
    assert found.converged
    assert constraint.contains(found.coefficients)
    for block in range(4):
        value, d = clarabel(f[block], r[block], constraint)
        assert float(found.values[block]) == pytest.approx(value, rel=1e-6)
        if rank is None:
            np.testing.assert_allclose(found.coefficients[block], d, atol=1e-6)


@pytest.mark.parametrize("name", CONSTRAINTS)
@pytest.mark.parametrize("known", [False, True])
def test_large_products_against_clarabel(name, known):
    constraint = CONSTRAINTS[name]
    f, r, problem = instance(5, 2, 80)
    found = solve(Product(problem, known), constraint)
    assert found.converged
    assert found.iterations > 0
    assert constraint.contains(found.coefficients)
    for block in range(2):
        value, d = clarabel(f[block], r[block], constraint)
        assert float(found.values[block]) == pytest.approx(value, rel=1e-6)
        np.testing.assert_allclose(found.coefficients[block], d, atol=1e-6)


def test_many_boxes_against_scipy():
    f, r, problem = instance(0, 300, 4, spread=3)
    found = solve(problem, box())
    for block in range(300):
        peer = lsq_linear(f[block], -r[block], (0, 1), method="bvls", tol=1e-14, max_iter=100)
        np.testing.assert_allclose(found.coefficients[block], peer.x, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 6),
    st.integers(1, 8),
    st.floats(0, 6),
    st.sampled_from(sorted(CONSTRAINTS)),
)
def test_every_solution_satisfies_the_optimality_conditions(seed, n, rank, spread, name):
    constraint = CONSTRAINTS[name]
    _, _, problem = instance(seed, 5, n, rank, spread)
    found = solve(problem, constraint)
    assert found.converged
    assert constraint.contains(found.coefficients)
    assert float(optimality(problem, found.coefficients, constraint).max()) <= 1e-8
    # No other point that is allowed has a smaller J: convexity, seen from a few random ones.
    others = torch.randn(20, 5, n, generator=torch.Generator().manual_seed(seed)).double()
    for other in others:
        allowed = constraint.project(other)
        assert (found.values <= problem.values(allowed) + 1e-9 * problem.constant).all()


def test_the_residual_sees_what_is_not_optimal():
    _, _, problem = instance(0, 5, 4)
    for constraint in CONSTRAINTS.values():
        best = solve(problem, constraint).coefficients
        moved = constraint.project(best + 0.01 * torch.arange(4))
        assert (optimality(problem, moved, constraint) > 1e-4).all()


def test_singular_blocks_have_the_least_norm():
    f, r, problem = instance(3, 6, 5, rank=3)
    f[2, :, 4] = 0
    f[3] = np.random.default_rng(0).normal(size=(3, 1)) * np.ones(5)
    f[4] = 0
    problem = quadratic(f, r)
    found = solve(problem)
    for block in range(6):
        expected = np.linalg.lstsq(f[block], -r[block], rcond=None)[0]
        np.testing.assert_allclose(found.coefficients[block], expected, atol=1e-9)
    assert found.undetermined.all(dim=1)[[0, 3, 4]].all()


def test_only_what_is_undetermined_is_said_to_be():
    f = np.zeros((1, 4, 4))
    f[0, 0, 0], f[0, 1, 1], f[0, 1, 2] = 1, 2, 2
    r = np.array([[1.0, 1.0, 0.0, 0.0]])
    found = solve(quadratic(f, r))
    assert found.undetermined.tolist() == [[False, True, True, True]]
    np.testing.assert_allclose(found.coefficients[0], [-1, -0.25, -0.25, 0], atol=1e-12)
    # A bound that holds a coefficient settles it; what no example sees stays open.
    assert solve(quadratic(f, -r), box(-1, 1)).undetermined.tolist() == [[False, True, True, True]]
    assert solve(quadratic(f, r), box(0, 1)).undetermined.tolist() == [[False, False, False, True]]


@pytest.mark.parametrize("constraint", [NON_NEGATIVE, box(), SIMPLEX])
def test_equal_directions_share_evenly_under_constraints(constraint):
    f, r, _ = instance(1, 3, 4)
    f[:, :, 3] = f[:, :, 2]
    r[:] = -f @ np.array([0.2, 0.3, 0.4, 0.1])
    found = solve(quadratic(f, r), constraint)
    expected = torch.tensor([0.2, 0.3, 0.25, 0.25], dtype=torch.float64).expand(3, 4)
    torch.testing.assert_close(found.coefficients, expected, atol=1e-6, rtol=0)
    assert found.undetermined[:, 2:].all()
    assert not found.undetermined[:, :2].any()


@pytest.mark.parametrize("size", [1e-2, 1e-3, 1e-4, 1e-5])
def test_equal_directions_do_not_disturb_small_ones(size):
    f, r, _ = instance(1, 3, 4)
    f[:, :, 3] = f[:, :, 2]
    f[:, :, 0] *= size
    best = np.array([2.0, 0.3, 0.25, 0.25])
    r[:] = -f @ best
    for constraint in (NON_NEGATIVE, box(0, 3)):
        found = solve(quadratic(f, r), constraint)
        assert found.converged
        np.testing.assert_allclose(found.coefficients, np.tile(best, (3, 1)), rtol=1e-4)


def test_the_size_of_a_direction_does_not_matter():
    f, r, problem = instance(2, 8, 4)
    sizes = np.array([1, 1e-6, 1e3, 1e-9])
    scaled = solve(quadratic(f * sizes, r))
    assert not scaled.undetermined.any()
    np.testing.assert_allclose(scaled.values, solve(problem).values, rtol=1e-9)
    boxed = solve(quadratic(f * sizes, r), NON_NEGATIVE)
    np.testing.assert_allclose(boxed.values, solve(problem, NON_NEGATIVE).values, rtol=1e-9)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_a_ridge_is_more_rows(name):
    constraint = CONSTRAINTS[name]
    f, r, problem = instance(2, 3, 4)
    strength = 0.1 * float(problem.diagonal().mean())
    rows = np.broadcast_to(math.sqrt(strength) * np.eye(4), (3, 4, 4))
    more = quadratic(np.concatenate([f, rows], axis=1), np.concatenate([r, np.zeros((3, 4))], 1))
    found = solve(problem, constraint, ridge=0.1)
    torch.testing.assert_close(found.coefficients, solve(more, constraint).coefficients)
    torch.testing.assert_close(found.values, problem.values(found.coefficients))


def test_a_ridge_on_a_large_product():
    _, _, problem = instance(2, 2, 70)
    for constraint in (FREE, box()):
        formed = solve(problem, constraint, ridge=0.1)
        found = solve(Product(problem, diagonal=True), constraint, ridge=0.1)
        torch.testing.assert_close(found.coefficients, formed.coefficients, atol=1e-7, rtol=0)


def test_blocks_that_share_a_matrix():
    f, _, _ = instance(4, 1, 5)
    _, _, other = instance(5, 7, 5)
    shared = quadratic(f, np.zeros((1, 10))).matrix
    one = BlockQuadratic(shared, other.linear, other.constant)
    many = BlockQuadratic(shared.expand(7, 5, 5), other.linear, other.constant)
    for constraint in CONSTRAINTS.values():
        torch.testing.assert_close(
            solve(one, constraint).coefficients, solve(many, constraint).coefficients
        )


@pytest.mark.parametrize("rank", [None, 30])
def test_conjugate_gradients_against_numpy(rank):
    f, r, problem = instance(6, 3, 70, rank)
    d, steps = conjugate_gradients(Product(problem))
    assert steps <= 200
    for block in range(3):
        expected = np.linalg.lstsq(f[block], -r[block], rcond=None)[0]
        np.testing.assert_allclose(d[block], expected, atol=1e-7)


def test_what_has_not_converged_says_so():
    _, _, problem = instance(7, 2, 80, spread=2)
    d, steps = proportioning(problem, box(), torch.zeros(2, 80).double(), max_iterations=3)
    with pytest.warns(ProjectionWarning, match="2 of 2 blocks have not converged"):
        found = solution(problem, d, box(), iterations=steps)
    assert not found.converged
    assert found.residual > 1e-8
    with pytest.warns(ProjectionWarning, match="not converged"):
        solution(problem, conjugate_gradients(problem, max_iterations=2)[0], FREE)


def test_simplex_projection_against_clarabel():
    points = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).double()
    ours = SIMPLEX.project(points)
    for point, nearest in zip(points, ours, strict=True):
        _, d = clarabel(np.eye(7), -point.numpy(), SIMPLEX)
        np.testing.assert_allclose(nearest, d, atol=1e-6)
    torch.testing.assert_close(SIMPLEX.project(ours), ours)


def test_nothing_is_silent_about_empty_and_zero_programmes():
    nothing = BlockQuadratic(torch.zeros(0, 4, 4), torch.zeros(0, 4), torch.zeros(0))
    zero = BlockQuadratic(*(torch.zeros(2, *s).double() for s in [(3, 3), (3,), ()]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for constraint in CONSTRAINTS.values():
            assert solve(nothing, constraint).coefficients.shape == (0, 4)
            found = solve(zero, constraint)
            assert found.captured == 1
            assert constraint.contains(found.coefficients)
            assert found.undetermined.any()


def test_bad_input_is_refused():
    _, _, problem = instance(0, 2, 3)
    with pytest.raises(MethodError, match="do not fit"):
        BlockQuadratic(problem.matrix, problem.linear[:, :2], problem.constant)
    with pytest.raises(MethodError, match="NaN"):
        BlockQuadratic(problem.matrix / 0, problem.linear, problem.constant)
    with pytest.raises(MethodError, match="no coefficient lies"):
        box(1, 0)
    with pytest.raises(MethodError, match="no coefficient lies"):
        box(math.nan, 0)
    with pytest.raises(MethodError, match="positive total"):
        Constraint(lower=0, total=0)
    with pytest.raises(MethodError, match="simplex"):
        Constraint(lower=-1, total=1)
    for constraint in (FREE, box()):
        with pytest.raises(MethodError, match="ridge"):
            solve(problem, constraint, ridge=-1)
        with pytest.raises(MethodError, match="diagonal"):
            solve(Product(instance(0, 1, 70)[2]), constraint, ridge=1)
