"""What projection promises: the optimum is one, bases nest, and rank bounds what they capture."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import MethodError
from isthmus.projection import heuristics
from isthmus.projection.constraints import FREE, NON_NEGATIVE, SIMPLEX, box
from isthmus.projection.directions import Directions
from isthmus.projection.neighbours import regmean
from isthmus.projection.optimal import expert_spectrum
from isthmus.projection.project import project
from isthmus.projection.solve import solve
from isthmus.projection.task_vector_bases import Elementwise, RowGroups

from .layers import BASES, bases, layer

SIZES = st.tuples(st.integers(1, 4), st.integers(2, 6), st.integers(2, 6), st.integers(1, 15))


def points(tau, seed):
    """Heuristics with their coefficients within [0, 2]."""
    yield heuristics.task_arithmetic(tau, 0.4)
    yield heuristics.task_arithmetic(tau, [0.1 + 0.2 * k for k in range(len(tau))])
    yield heuristics.soup(tau)
    yield heuristics.ties(tau, density=0.4)
    yield heuristics.dare(tau, [seed + k for k in range(len(tau))], density=0.5)


@settings(max_examples=25, deadline=None)
@given(SIZES, st.integers(0, 10**6))
@pytest.mark.filterwarnings("ignore::isthmus.projection.quadratic.ProjectionWarning")
def test_no_heuristic_of_the_same_basis_is_better(sizes, seed):
    experts, m, n, examples = sizes
    one = layer(seed, experts, m, n, examples)
    objective = one.objective
    for name, basis in bases(one).items():
        best = [(c, project(basis, objective, c)) for c in (FREE, box(0, 2), NON_NEGATIVE)]
        for heuristic in points(one.tau, seed):
            try:
                d = basis.point(heuristic)
            except MethodError:
                assert name != "elementwise"
                continue
            torch.testing.assert_close(basis.correction(d), heuristic.correction)
            reached = one.error(heuristic.correction) + 1e-7 * objective.initial
            for constraint, found in best:
                if constraint.contains(d):
                    assert found.irreducible <= reached
                    assert one.error(found.correction) <= reached


def test_ties_and_dare_lie_in_boxes_of_the_elementwise_basis():
    tau = layer().tau
    basis = Elementwise(tau)
    assert box().contains(basis.point(heuristics.ties(tau, density=0.3)))
    assert box(0, 4).contains(basis.point(heuristics.dare(tau, [1, 2, 3], density=0.25)))
    soup = heuristics.soup(tau, [1, 2, 5])
    assert SIMPLEX.contains(RowGroups.diagonal(tau).point(soup))


def test_the_scalar_basis_is_the_least_squares_soup():
    one = layer()
    rows, targets = [], []
    for target, x in zip(one.tau, one.inputs, strict=True):
        rows.append(torch.stack([(x @ tau.mT).ravel() for tau in one.tau], dim=1))
        targets.append((x @ target.mT).ravel())
    expected, error, *_ = np.linalg.lstsq(torch.cat(rows), torch.cat(targets), rcond=None)
    found = project(RowGroups.scalar(one.tau), one.objective)
    np.testing.assert_allclose(found.solution.coefficients[0], expected, rtol=1e-9)
    assert found.irreducible == pytest.approx(error[0])


def test_the_diagonal_basis_is_least_squares_row_by_row():
    one = layer()
    found = project(RowGroups.diagonal(one.tau), one.objective)
    for i in range(6):
        rows = torch.cat([x @ one.tau[:, i].mT for x in one.inputs])
        pairs = zip(one.tau, one.inputs, strict=True)
        expected = np.linalg.lstsq(rows, torch.cat([x @ t[i] for t, x in pairs]), rcond=None)[0]
        np.testing.assert_allclose(found.solution.coefficients[i], expected, rtol=1e-8)


def test_unconstrained_elementwise_projection_is_regmean():
    one = layer()
    found = project(Elementwise(one.tau), one.objective)
    torch.testing.assert_close(
        found.correction, regmean(one.tau, one.moments), rtol=1e-6, atol=1e-6
    )
    assert found.irreducible == pytest.approx(one.objective.floor())


def test_the_closed_form_is_the_solvers_answer():
    one = layer()
    basis = Elementwise(one.tau)
    known = basis.closed_form(one.objective)
    solved = solve(basis.quadratic(one.objective))
    torch.testing.assert_close(known, solved.coefficients, atol=1e-6, rtol=1e-6)
    # Where it does not hold, there is none: an entry that no expert changed, an input never seen.
    one.tau[:, 0, 0] = 0
    basis = Elementwise(one.tau)
    assert basis.closed_form(one.objective) is None
    found = project(basis, one.objective)
    assert found.correction[0, 0] == 0
    assert found.irreducible > one.objective.floor()
    assert Elementwise(layer().tau).closed_form(layer(examples=1).objective) is None


NESTED = [
    ("scalar", "row groups"),
    ("row groups", "rows"),
    ("rows", "elementwise"),
    ("scalar", "column groups"),
    ("column groups", "columns"),
    ("columns", "elementwise"),
    ("scalar", "directions"),
]


@pytest.mark.parametrize("constraint", [FREE, NON_NEGATIVE, box()])
@pytest.mark.parametrize("seed", range(5))
def test_a_larger_basis_captures_more(seed, constraint):
    one = layer(seed)
    found = {name: project(basis, one.objective, constraint) for name, basis in bases(one).items()}
    for projection in found.values():
        assert projection.solution.converged
        assert constraint.contains(projection.solution.coefficients)
    captured = {name: projection.captured for name, projection in found.items()}
    for small, large in NESTED:
        assert captured[small] <= captured[large] + 1e-9, (small, large)
    assert captured["scalar"] > 0
    assert captured["elementwise"] <= 1 - one.objective.floor() / one.objective.initial + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_a_looser_constraint_captures_more(seed):
    one = layer(seed)
    for name in ("scalar", "rows", "columns", "elementwise"):
        order = [box(), NON_NEGATIVE, FREE]
        shares = [project(bases(one)[name], one.objective, c).captured for c in order]
        assert shares == pytest.approx(sorted(shares), abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_no_correction_beats_the_optimal_directions_of_its_rank(seed):
    one = layer(seed, m=6, n=5)
    spectrum = expert_spectrum(one.tau, one.moments)
    for basis in bases(one).values():
        found = project(basis, one.objective)
        rank = int(torch.linalg.matrix_rank(found.correction))
        assert found.captured <= spectrum.captured(rank) + 1e-9
    for count in range(1, 6):
        generator = torch.Generator().manual_seed(seed)
        left = torch.randn(count, 6, 1, generator=generator, dtype=torch.float64)
        right = torch.randn(count, 1, 5, generator=generator, dtype=torch.float64)
        found = project(Directions(left @ right), one.objective)
        assert found.captured <= spectrum.captured(count) + 1e-9


@pytest.mark.parametrize("name", BASES)
def test_the_report_agrees_with_the_outputs(name):
    one = layer()
    found = project(bases(one)[name], one.objective)
    assert found.initial == pytest.approx(one.error(torch.zeros(6, 5)))
    assert found.irreducible == pytest.approx(one.error(found.correction))
    assert found.captured == pytest.approx(1 - found.irreducible / found.initial)


def test_one_expert_is_reproduced():
    one = layer(experts=1)
    for name in ("scalar", "row groups", "rows", "column groups", "columns"):
        found = project(bases(one)[name], one.objective)
        torch.testing.assert_close(found.correction, one.tau[0])
        assert found.captured == pytest.approx(1)


def test_the_order_of_experts_does_not_matter():
    one = layer()
    turned = layer()
    turned.tau, turned.inputs = one.tau.flip(0), one.inputs[::-1]
    for name in ("scalar", "rows", "columns", "elementwise"):
        for constraint in (FREE, box()):
            left = project(bases(one)[name], one.objective, constraint)
            right = project(bases(turned)[name], turned.objective, constraint)
            torch.testing.assert_close(left.correction, right.correction, rtol=1e-6, atol=1e-6)
