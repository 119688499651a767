"""Every basis: a linear map, its adjoint, and its normal equations."""

from __future__ import annotations

import pytest
import torch

from isthmus.errors import MethodError
from isthmus.projection.basis import SpanQuadratic
from isthmus.projection.constraints import SIMPLEX
from isthmus.projection.directions import OutputDirections
from isthmus.projection.project import project
from isthmus.projection.task_vector_bases import ColumnGroups, Elementwise, RowGroups

from .layers import BASES, bases, layer


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(params=BASES)
def named(request):
    one = layer()
    return one, bases(one)[request.param]


def test_the_adjoint_is_one(named):
    one, basis = named
    d, matrix = normal(*basis.shape), normal(*one.base.shape, seed=1)
    torch.testing.assert_close(
        (basis.adjoint(matrix) * d).sum(), (matrix * basis.correction(d)).sum()
    )
    assert basis.dimension == d.numel()


def test_the_quadratic_is_the_error_of_the_outputs(named):
    one, basis = named
    quadratic = basis.quadratic(one.objective)
    for d in (torch.zeros(basis.shape).double(), normal(*basis.shape)):
        expected = one.error(basis.correction(d))
        assert float(quadratic.values(d).sum()) == pytest.approx(expected, rel=1e-10)


def test_formed_and_unformed_are_the_same(named):
    one, basis = named
    formed = basis.quadratic(one.objective).formed()
    product = SpanQuadratic.of(basis, one.objective)
    d = normal(*basis.shape)
    torch.testing.assert_close(formed.product(d), product.product(d))
    matrix = formed.matrix.expand(len(d), -1, -1)
    torch.testing.assert_close(product.formed().matrix, matrix)
    known = basis.quadratic(one.objective).diagonal()
    if known is not None:
        torch.testing.assert_close(known, torch.diagonal(matrix, dim1=1, dim2=2))


def test_blocks_do_not_interact(named):
    one, basis = named
    quadratic = basis.quadratic(one.objective)
    d = normal(*basis.shape)
    alone = torch.zeros_like(d)
    alone[0] = d[0]
    change = one.error(basis.correction(d)) - one.error(basis.correction(d - alone))
    values = quadratic.values(d) - quadratic.values(d - alone)
    assert float(values[0]) == pytest.approx(change, rel=1e-9)
    assert not values[1:].any()


def test_a_point_of_the_span_is_found_again(named):
    _, basis = named
    correction = basis.correction(normal(*basis.shape))
    torch.testing.assert_close(basis.correction(basis.nearest(correction)), correction)


def test_zeros_and_small_entries_are_points_of_the_elementwise_basis():
    one = layer()
    one.tau[:, 2:4] = 0
    one.tau[:, 4] *= 1e-7
    basis = Elementwise(one.tau)
    correction = basis.correction(normal(*basis.shape))
    torch.testing.assert_close(basis.correction(basis.nearest(correction)), correction)
    with pytest.raises(MethodError, match="not in the span"):
        basis.nearest(correction + one.base)


def test_torch_can_differentiate_a_correction(named):
    _, basis = named
    d, move = normal(*basis.shape), normal(*basis.shape, seed=2)
    _, tangent = torch.func.jvp(basis.correction, (d,), (move,))
    torch.testing.assert_close(tangent, basis.correction(move))


def test_what_is_not_in_the_span_is_refused():
    one = layer()
    matrix = normal(6, 5, seed=3)
    for name, basis in bases(one).items():
        if name != "elementwise":
            with pytest.raises(MethodError, match="not in the span"):
                basis.nearest(matrix)


def test_many_columns_are_not_formed():
    one = layer(experts=2, m=3, n=2100)
    basis = ColumnGroups.diagonal(one.tau)
    quadratic = basis.quadratic(one.objective)
    assert isinstance(quadratic, SpanQuadratic)
    d = normal(*basis.shape)
    assert float(quadratic.values(d).sum()) == pytest.approx(one.error(basis.correction(d)))


def test_bad_input_is_refused():
    one = layer()
    with pytest.raises(MethodError, match="groups"):
        RowGroups(one.tau, torch.arange(5))
    with pytest.raises(MethodError, match="groups"):
        ColumnGroups(one.tau, torch.arange(5) - 1)
    with pytest.raises(MethodError, match="orthonormal"):
        OutputDirections(torch.ones(6, 2), 5)
    with pytest.raises(MethodError, match="NaN"):
        Elementwise(one.tau / 0)
    other = layer(n=4).objective
    for basis in bases(one).values():
        with pytest.raises(MethodError, match=r"\[6, 5\].*\[6, 4\]"):
            basis.quadratic(other)
    for name in ("columns", "elementwise", "output directions"):
        with pytest.raises(MethodError, match="simplex"):
            project(bases(one)[name], one.objective, SIMPLEX)
