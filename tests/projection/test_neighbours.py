"""RegMean and Fisher merging from the same statistics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isthmus.errors import MethodError
from isthmus.projection.neighbours import diagonal_fisher, kronecker_fisher, regmean

from .layers import layer


@pytest.mark.parametrize("keep", [1.0, 0.8, 0.0])
def test_regmean_is_its_formula(keep):
    one = layer()
    left, right = np.zeros((6, 5)), np.zeros((5, 5))
    for weight, tau, x in zip((1.0, 2.0, 0.5), one.tau, one.inputs, strict=True):
        gram = (x.mT @ x).numpy()
        gram = weight * (keep * gram + (1 - keep) * np.diag(np.diag(gram)))
        left, right = left + (one.base + tau).numpy() @ gram, right + gram
    expected = np.linalg.solve(right, left.T).T - one.base.numpy()
    found = regmean(one.tau, one.moments, [1.0, 2.0, 0.5], keep=keep)
    np.testing.assert_allclose(found, expected, atol=1e-8)


def test_diagonal_fisher_is_its_formula():
    one = layer()
    gradients = [torch.diag(torch.arange(1.0, 7.0) ** k).double() for k in range(3)]
    found = diagonal_fisher(one.tau, one.moments, output_gradients=gradients)
    fishers = torch.stack(
        [
            torch.outer(g.diagonal(), x.square().sum(0))
            for g, x in zip(gradients, one.inputs, strict=True)
        ]
    )
    torch.testing.assert_close(found, (fishers * one.tau).sum(0) / fishers.sum(0))
    torch.testing.assert_close(
        diagonal_fisher(one.tau, one.moments), regmean(one.tau, one.moments, keep=0.0)
    )


def test_kronecker_fisher_of_the_layers_own_error_is_regmean():
    one = layer()
    found = kronecker_fisher(one.tau, one.moments, [1.0, 2.0, 0.5], damping=1e-12)
    expected = regmean(one.tau, one.moments, [1.0, 2.0, 0.5])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_bad_input_is_refused():
    one = layer()
    with pytest.raises(MethodError, match="keep"):
        regmean(one.tau, one.moments, keep=1.1)
    with pytest.raises(MethodError, match="inputs of 2 experts"):
        diagonal_fisher(one.tau, one.moments[:2])
    with pytest.raises(MethodError, match="gradients of 1"):
        kronecker_fisher(one.tau, one.moments, output_gradients=[torch.eye(6)])
