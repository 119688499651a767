"""Curvature against exact Hessians."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import eigsh
from torch import nn
from torch.func import functional_call

from isthmus.errors import PathError
from isthmus.paths.curvature import CurvatureWarning, curvature


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


class Small:
    """A network of two layers on random data, and its Hessian by torch.func.hessian."""

    def __init__(self, dtype=torch.float64, inputs=6, width=8):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)
        self.parameters = {name: p.detach() for name, p in self.net.named_parameters()}
        self.x = torch.randn(50, inputs, dtype=dtype)
        self.y = torch.randint(3, (50,))

    def summed(self, parameters, batch):
        x, y = batch
        outputs = functional_call(self.net, dict(parameters), (x,))
        return nn.functional.cross_entropy(outputs, y, reduction="sum"), len(x)

    def batches(self, sizes):
        return list(zip(self.x.split(sizes), self.y.split(sizes), strict=True))

    def hessian(self):
        names = list(self.parameters)
        shapes = [self.parameters[name].shape for name in names]

        def loss(flat):
            parts = flat.split([shape.numel() for shape in shapes])
            tensors = {
                n: part.view(shape) for n, part, shape in zip(names, parts, shapes, strict=True)
            }
            return self.summed(tensors, (self.x.double(), self.y))[0] / len(self.x)

        flat = torch.cat([self.parameters[name].flatten() for name in names])
        return torch.func.hessian(loss)(flat)


def test_top_eigenvalue_and_trace_of_a_network():
    small = Small()
    exact = small.hessian()
    top = float(torch.linalg.eigvalsh(exact)[-1])
    found = curvature(small.summed, small.parameters, small.batches(50), generator=seeded(1))
    assert found.dimension == len(exact) == 83
    assert found.converged
    assert found.residual <= 1e-3
    assert found.top == pytest.approx(top, rel=1e-5)
    assert found.trace == pytest.approx(float(exact.trace()), abs=4 * found.trace_error)
    assert 0 < found.trace_error < 0.2 * abs(found.trace)
    assert found.products > 0


def test_in_float32_to_a_percent():
    small = Small(torch.float32)
    found = curvature(small.summed, small.parameters, small.batches(50), generator=seeded())
    assert found.converged
    assert found.top == pytest.approx(_double_top(small), rel=1e-2)


def _double_top(small):
    """The exact eigenvalue of the same float32 numbers."""
    wide = Small()
    wide.parameters = {name: p.double() for name, p in small.parameters.items()}
    wide.x, wide.y = small.x.double(), small.y
    return float(torch.linalg.eigvalsh(wide.hessian())[-1])


@pytest.mark.parametrize("sizes", [[50], [1, 49], [10] * 5, [20, 20, 10]])
def test_batches_do_not_matter(sizes):
    small = Small()
    one = curvature(small.summed, small.parameters, small.batches(50), generator=seeded())
    cut = curvature(small.summed, small.parameters, small.batches(sizes), generator=seeded())
    assert cut.top == pytest.approx(one.top, rel=1e-9)
    assert cut.trace == pytest.approx(one.trace, rel=1e-9)


def test_the_same_seed_gives_the_same_bytes():
    small = Small()
    one, same = (
        curvature(small.summed, small.parameters, small.batches(25), generator=seeded(4))
        for _ in range(2)
    )
    assert one == same


class Bowl:
    """½ xᵀ diag(values) x, the mean over batches that are alike."""

    def __init__(self, values):
        self.values = torch.as_tensor(values, dtype=torch.float64)
        self.parameters = {"x": torch.ones(len(self.values), dtype=torch.float64)}

    def summed(self, parameters, batch):
        return batch * (self.values * parameters["x"].square()).sum() / 2, batch


@pytest.mark.parametrize("values", [[3.0], [1.0, -7.0, 2.0], list(range(-9, 11))])
def test_few_dimensions_are_exact(values):
    found = curvature(Bowl(values).summed, Bowl(values).parameters, [1, 3], generator=seeded())
    assert found.top == pytest.approx(max(values))
    assert found.trace == pytest.approx(sum(values))
    assert (found.residual, found.trace_error, found.converged) == (0, 0, True)


def test_the_largest_is_not_the_largest_in_size():
    values = [-50.0, 4.0, *[0.1] * 40]
    found = curvature(Bowl(values).summed, Bowl(values).parameters, [2], generator=seeded())
    assert found.top == pytest.approx(4)
    assert found.trace == pytest.approx(-42, abs=4 * found.trace_error)
    assert found.trace_error < 0.5


def test_the_standard_error_is_that_of_many_estimates():
    torch.manual_seed(1)
    values = torch.randn(100, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(100, 100, dtype=torch.float64)).Q
    matrix = turn @ torch.diag(values) @ turn.T

    def summed(parameters, batch):
        x = parameters["x"]
        return batch * (x @ matrix @ x) / 2, batch

    start = {"x": torch.ones(100, dtype=torch.float64)}
    off, errors = [], []
    for seed in range(60):
        found = curvature(summed, start, [1], generator=seeded(seed), tolerance=0.5, probes=8)
        off.append(found.trace - float(values.sum()))
        errors.append(found.trace_error)
    spread, error = (torch.tensor(each).square().mean().sqrt() for each in (off, errors))
    assert 0.7 < float(spread / error) < 1.4
    assert abs(sum(off) / 60) < 3 * float(spread) / 60**0.5


def test_only_what_is_named_counts():
    bowl = Bowl([5.0, 2.0])

    def summed(parameters, batch):
        total, count = bowl.summed(parameters, batch)
        return total + 50 * parameters["y"].square().sum(), count

    parameters = bowl.parameters | {"y": torch.ones(3), "count": torch.tensor(3)}
    found = curvature(summed, parameters, [1], names=["x"], generator=seeded())
    assert (found.top, found.dimension) == (5, 2)


def test_what_does_not_converge_says_so():
    values = 1 + 1e-9 * torch.arange(400)
    rough = Bowl(torch.cat([values, torch.linspace(0, 1, 400)]))
    with pytest.warns(CurvatureWarning, match="residual"):
        found = curvature(
            rough.summed, rough.parameters, [1], generator=seeded(), tolerance=1e-16, probes=2
        )
    assert not found.converged
    assert found.top == pytest.approx(1, rel=0.05)


def test_a_loss_without_curvature():
    def linear(parameters, batch):
        return parameters["x"].sum() * batch, batch

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = curvature(linear, {"x": torch.ones(30)}, [1], generator=seeded())
    assert (found.top, found.trace, found.residual) == (0, 0, 0)


def test_refusals():
    bowl = Bowl([1.0, 2.0])
    call = {"generator": seeded()}
    with pytest.raises(PathError, match="no data"):
        curvature(bowl.summed, bowl.parameters, [], **call)
    with pytest.raises(PathError, match="hold no examples"):
        curvature(bowl.summed, bowl.parameters, [0], **call)
    with pytest.raises(PathError, match="1 probes"):
        curvature(bowl.summed, bowl.parameters, [1], probes=1, **call)
    with pytest.raises(PathError, match="no tensor 'z'"):
        curvature(bowl.summed, bowl.parameters, [1], names=["z"], **call)
    with pytest.raises(PathError, match="no tensor to differentiate"):
        curvature(bowl.summed, {"x": torch.ones(2, dtype=torch.int64)}, [1], **call)
    with pytest.raises(PathError, match="not finite"):
        curvature(Bowl([torch.inf, 1.0]).summed, bowl.parameters, [1], **call)
    with pytest.raises(PathError, match="does not depend"):
        curvature(lambda p, _: (p["x"].detach().sum(), 1), bowl.parameters, [1], **call)


def test_against_curvlinops():
    """Runs where that library is installed; it brings torchvision and more, so it is no dependency."""
    curvlinops = pytest.importorskip("curvlinops")
    small = Small()
    operator = curvlinops.HessianLinearOperator(
        small.net, nn.CrossEntropyLoss(), list(small.net.parameters()), small.batches(25)
    ).to_scipy()
    top = float(eigsh(operator, k=1, which="LA", return_eigenvectors=False)[0])
    trace = sum(float((operator @ row)[i]) for i, row in enumerate(np.eye(len(small.hessian()))))
    found = curvature(small.summed, small.parameters, small.batches(25), generator=seeded(1))
    assert found.top == pytest.approx(top, rel=1e-3)
    assert abs(found.trace - trace) < 4 * found.trace_error + 1e-9
