"""The network-output objective: matrix-free, formed, and by explicit Jacobians."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from isthmus.errors import MethodError
from isthmus.projection.conjugate import conjugate_gradients
from isthmus.projection.constraints import FREE, NON_NEGATIVE, box
from isthmus.projection.jacobian import JacobianPair, JacobianQuadratic, linearized
from isthmus.projection.solve import solve
from isthmus.projection.task_vector_bases import RowGroups

from .layers import layer


class Network:
    """Two layers, corrected in both, with residuals at the output."""

    def __init__(self, width=12):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 4)).double()
        self.names = ("0.weight", "2.weight")
        weights = dict(self.net.named_parameters())
        self.weights = {name: weights[name].detach() for name in weights}
        self.tau = [0.3 * torch.randn(3, *self.weights[name].shape).double() for name in self.names]
        self.bases = [RowGroups.diagonal(tau) for tau in self.tau]
        self.dimension = sum(basis.dimension for basis in self.bases)
        self.inputs = [torch.randn(15, 5).double() for _ in range(3)]

    def outputs(self, x):
        def of(d):
            corrected = dict(self.weights)
            start = 0
            for name, basis in zip(self.names, self.bases, strict=True):
                part = d[start : start + basis.dimension].reshape(basis.shape)
                start += basis.dimension
                corrected[name] = corrected[name] + basis.correction(part)
            return functional_call(self.net, corrected, (x,))

        return of

    def target(self, expert):
        weights = dict(self.weights)
        for name, tau in zip(self.names, self.tau, strict=True):
            weights[name] = weights[name] + tau[expert]
        with torch.no_grad():
            return functional_call(self.net, weights, (self.inputs[expert],))

    def batches(self):
        return [
            linearized(self.outputs(x), self.target(k), self.dimension, torch.float64)
            for k, x in enumerate(self.inputs)
        ]

    def written_out(self):
        """The same batches with their Jacobians as matrices, which solvers can use many times."""
        found = []
        for batch in self.batches():
            units = torch.eye(self.dimension).double()
            a = torch.stack([batch.forward(unit).ravel() for unit in units], dim=1)
            found.append(
                JacobianPair(lambda d, a=a: a @ d, lambda r, a=a: a.mT @ r, batch.residual.ravel())
            )
        return found

    def explicit(self):
        """All Jacobians, as rows of one matrix, and all residuals."""
        zero = torch.zeros(self.dimension).double()
        rows = [torch.func.jacrev(self.outputs(x))(zero) for x in self.inputs]
        errors = [self.outputs(x)(zero) - self.target(k) for k, x in enumerate(self.inputs)]
        return (
            torch.cat([row.reshape(-1, self.dimension) for row in rows]).detach(),
            torch.cat([error.ravel() for error in errors]).detach(),
        )


def test_products_are_those_of_the_jacobian():
    network = Network()
    a, b = network.explicit()
    quadratic = JacobianQuadratic(network.batches())
    d = torch.randn(1, network.dimension).double()
    torch.testing.assert_close(quadratic.product(d)[0], a.mT @ (a @ d[0]))
    torch.testing.assert_close(quadratic.linear[0], a.mT @ b)
    expected = (a @ d[0] + b).square().sum()
    torch.testing.assert_close(quadratic.values(d)[0], expected)
    torch.testing.assert_close(quadratic.formed().matrix[0], a.mT @ a)


@pytest.mark.parametrize("constraint", [FREE, NON_NEGATIVE, box()])
def test_matrix_free_is_the_formed_answer(constraint):
    network = Network(width=20)
    quadratic = JacobianQuadratic(network.written_out())
    assert quadratic.shape[1] > 64  # so that the solver does not form it
    found = solve(quadratic, constraint)
    formed = solve(quadratic.formed(), constraint)
    assert found.converged
    assert found.value == pytest.approx(formed.value, rel=1e-9)
    # Coefficients that the outputs hardly see may differ; what the outputs see may not.
    a, b = network.explicit()
    images = [a @ one.coefficients[0] for one in (found, formed)]
    torch.testing.assert_close(images[0], images[1], atol=1e-5, rtol=0)
    if constraint.free:
        expected = a.numpy() @ np.linalg.lstsq(a.numpy(), -b.numpy(), rcond=None)[0]
        np.testing.assert_allclose(images[0], expected, atol=1e-5)


def test_more_coefficients_than_outputs_have_the_least_norm():
    network = Network(width=20)
    network.inputs = [x[:4] for x in network.inputs]
    quadratic = JacobianQuadratic(network.written_out())
    a, b = network.explicit()
    d, _ = conjugate_gradients(quadratic)
    expected = np.linalg.lstsq(a, -b, rcond=None)[0]
    np.testing.assert_allclose(d[0], expected, atol=1e-5)


def test_of_a_lone_layer_it_is_the_layers_objective():
    one = layer()
    basis = RowGroups.diagonal(one.tau)
    batches = [
        linearized(
            lambda d, x=x: x @ (one.base + basis.correction(d.reshape(basis.shape))).mT,
            x @ (one.base + tau).mT,
            basis.dimension,
            torch.float64,
        )
        for tau, x in zip(one.tau, one.inputs, strict=True)
    ]
    found = solve(JacobianQuadratic(batches))
    local = solve(basis.quadratic(one.objective))
    torch.testing.assert_close(found.coefficients.reshape(basis.shape), local.coefficients)
    assert found.captured == pytest.approx(local.captured)


def test_a_network_in_single_precision():
    network = Network(width=8)
    exact = solve(JacobianQuadratic(network.batches()))
    network.net.float()
    network.weights = {name: w.float() for name, w in network.weights.items()}
    for basis in network.bases:
        basis.task_vectors = basis.task_vectors.float()
    network.inputs = [x.float() for x in network.inputs]
    network.tau = [tau.float() for tau in network.tau]
    batches = [
        linearized(network.outputs(x), network.target(k), network.dimension, torch.float32)
        for k, x in enumerate(network.inputs)
    ]
    found = solve(JacobianQuadratic(batches))
    assert found.coefficients.dtype == torch.float64
    assert found.captured == pytest.approx(exact.captured, abs=1e-4)


def test_bad_input_is_refused():
    network = Network()
    with pytest.raises(MethodError, match="no calibration batches"):
        JacobianQuadratic([])
    with pytest.raises(MethodError, match="targets of shape"):
        linearized(
            network.outputs(network.inputs[0]), torch.zeros(2, 4).double(), 48, torch.float64
        )
    with pytest.raises(MethodError, match="NaN"):
        linearized(network.outputs(network.inputs[0] / 0), network.target(0), 48, torch.float64)
