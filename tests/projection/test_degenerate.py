"""Calibration that settles little: least-norm answers, no NaN, and a warning that says what is open."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from isthmus.projection.constraints import FREE, NON_NEGATIVE, SIMPLEX, box
from isthmus.projection.optimal import expert_spectrum, reduced_rank
from isthmus.projection.project import project
from isthmus.projection.quadratic import ProjectionWarning
from isthmus.projection.task_vector_bases import RowGroups

from .layers import BASES, bases, layer


def one_example():
    one = layer()
    one.inputs = [one.inputs[0][:1], one.inputs[1][:0], one.inputs[2][:0]]
    return one


def duplicates():
    one = layer()
    one.inputs = [x[:1].expand(30, -1) for x in one.inputs]
    return one


def expert_is_base():
    one = layer()
    one.tau[1] = 0
    return one


def identical_experts():
    one = layer()
    one.tau[2] = one.tau[0]
    return one


def zero_activations():
    one = layer()
    one.inputs = [torch.zeros_like(x) for x in one.inputs]
    return one


def tiny_activations():
    one = layer()
    one.inputs = [1e-150 * x for x in one.inputs]
    return one


CASES = [
    one_example,
    duplicates,
    expert_is_base,
    identical_experts,
    zero_activations,
    tiny_activations,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("name", BASES)
@pytest.mark.filterwarnings("ignore::isthmus.projection.quadratic.ProjectionWarning")
def test_answers_are_finite_and_no_worse_than_nothing(case, name):
    one = case()
    basis = bases(one)[name]
    for constraint in (FREE, NON_NEGATIVE, box()):
        found = project(basis, one.objective, constraint)
        assert torch.isfinite(found.correction).all()
        assert 0 <= found.captured <= 1 + 1e-9
        assert found.solution.converged
        assert constraint.contains(found.solution.coefficients)
        assert one.error(found.correction) <= one.objective.initial * (1 + 1e-9)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_optimal_directions_are_finite(case):
    one = case()
    found = reduced_rank(one.objective, 2)
    assert torch.isfinite(found.correction).all()
    assert bool(((found.captured >= 0) & (found.captured <= 1 + 1e-9)).all())
    assert 0 <= expert_spectrum(one.tau, one.moments).captured(2) <= 1 + 1e-9
    assert torch.isfinite(one.objective.regression()).all()


@pytest.mark.parametrize("name", ["scalar", "row groups", "rows", "columns", "directions"])
def test_the_unconstrained_answer_has_the_least_norm(name):
    for case in (one_example, duplicates, expert_is_base, identical_experts):
        one = case()
        basis = bases(one)[name]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ProjectionWarning)
            found = project(basis, one.objective)
        units = torch.eye(basis.dimension).double().reshape(-1, *basis.shape)
        columns = []
        for unit in units:
            images = [x @ basis.correction(unit).mT for x in one.inputs]
            columns.append(torch.cat([image.ravel() for image in images]))
        target = torch.cat(
            [(x @ tau.mT).ravel() for tau, x in zip(one.tau, one.inputs, strict=True)]
        )
        a = torch.stack(columns, dim=1)
        expected = np.linalg.lstsq(a.numpy(), target.numpy(), rcond=1e-9)[0]
        np.testing.assert_allclose(found.solution.coefficients.ravel(), expected, atol=1e-6)


def test_the_warning_names_what_is_open():
    one = identical_experts()
    basis = RowGroups.diagonal(one.tau)
    with pytest.warns(ProjectionWarning, match=r"12 of 18 .* 6 of 6 blocks, of the experts 1, 3"):
        found = project(basis, one.objective)
    torch.testing.assert_close(found.solution.coefficients[:, 0], found.solution.coefficients[:, 2])
    with pytest.warns(ProjectionWarning, match="of the experts 1, 3"):
        project(basis, one.objective, SIMPLEX)

    one = expert_is_base()
    with pytest.warns(ProjectionWarning, match="1 of 3 .* of the experts 2;"):
        found = project(RowGroups.scalar(one.tau), one.objective)
    assert found.solution.coefficients[0, 1] == 0

    one = zero_activations()
    with pytest.warns(ProjectionWarning, match="3 of 3 .* of the experts 1, 2, 3;"):
        found = project(RowGroups.scalar(one.tau), one.objective)
    assert not found.correction.any()
    assert found.captured == 1


def test_enough_calibration_is_not_warned_about():
    one = layer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("scalar", "row groups", "rows", "columns", "elementwise", "directions"):
            for constraint in (FREE, NON_NEGATIVE, box()):
                project(bases(one)[name], one.objective, constraint)


def test_a_ridge_settles_everything():
    one = identical_experts()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = project(RowGroups.diagonal(one.tau), one.objective, ridge=1e-6)
    assert found.undetermined is None
