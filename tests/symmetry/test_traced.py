"""Specs read from the graph keep the function, and find all units."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from isthmus.errors import SymmetryError
from isthmus.lab.networks.mlps import mlp, mlp_spec
from isthmus.lab.networks.resnets import ResNet, resnet_spec
from isthmus.lab.networks.state import state
from isthmus.symmetry.matching import match_weights
from isthmus.symmetry.spec import Spec
from isthmus.symmetry.traced import traced_spec


class Small(nn.Module):
    """Convolutions, depthwise too, pooling, flattening by hand, a gate, a norm."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.deep = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.pool = nn.MaxPool2d(2)
        self.up = nn.Linear(6 * 16, 10)
        self.gate = nn.Linear(6 * 16, 10)
        self.norm = nn.LayerNorm(10)
        self.down = nn.Linear(10, 4)

    def forward(self, x):
        x = self.pool(F.relu(self.deep(torch.relu(self.first(x)))))
        x = x.view(x.size(0), -1)
        return self.down(self.norm(self.up(x) * torch.sigmoid(self.gate(x))))


class Residual(nn.Module):
    """A stream of tokens with a tied block that runs twice."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(2):
            x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.head(x)


IMAGES = torch.randn(2, 3, 8, 8, dtype=torch.float64)
NETWORKS = {
    "mlp": (lambda: mlp(5, 7, 3, 4), torch.randn(3, 5, dtype=torch.float64)),
    "tanh": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)),
        torch.randn(3, 5, dtype=torch.float64),
    ),
    "no activation": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 2)),
        torch.randn(3, 5, dtype=torch.float64),
    ),
    "rms": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.RMSNorm(6), nn.Linear(6, 2)),
        torch.randn(3, 5, dtype=torch.float64),
    ),
    "vgg": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 5, 3),
            nn.BatchNorm2d(5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(45, 6),
            nn.GELU(),
            nn.Dropout(),
            nn.Linear(6, 2),
        ),
        IMAGES,
    ),
    "small": (Small, IMAGES),
    "residual": (Residual, torch.randint(11, (2, 4))),
    "resnet": (lambda: ResNet(4, 2, "batch"), torch.randn(2, 1, 12, 12, dtype=torch.float64)),
    "resnet, layer norm": (
        lambda: ResNet(4, 1, "layer"),
        torch.randn(2, 1, 12, 12, dtype=torch.float64),
    ),
}


def built(name):
    torch.manual_seed(0)
    make, example = NETWORKS[name]
    network = make().double().eval()
    for tensor in network.state_dict().values():
        if tensor.is_floating_point():
            tensor.add_(0.3 * torch.rand_like(tensor))
    return network, example


@pytest.mark.parametrize("name", NETWORKS)
def test_the_function_stays_on_all_axes_and_on_each(name):
    network, example = built(name)
    spec = traced_spec(network, example)
    assert spec.axes
    spec.check({key: tuple(tensor.shape) for key, tensor in network.state_dict().items()})
    old = state(network)
    with torch.no_grad():
        wanted = network(example)
        for axes in (list(spec.axes), *([axis] for axis in spec.axes)):
            part = spec.restricted(axes)
            moved = part.act(part.random(torch.Generator().manual_seed(1)), old)
            assert any(not torch.equal(moved[key], old[key]) for key in old)
            network.load_state_dict(moved)
            assert torch.allclose(network(example), wanted, atol=1e-10), axes
    network.load_state_dict(old)


def groups(spec: Spec):
    return sorted((group.units, group.factors) for group in spec.axes.values())


def test_an_mlp_is_what_one_would_write_by_hand():
    network, example = built("mlp")
    by_hand, traced = mlp_spec(7, 3), traced_spec(network, example)
    assert [(n, f) for n, f in groups(traced)] == [(7, "positive")] * 3
    assert len(by_hand.axes) == len(traced.axes)


def test_a_residual_network_has_the_axes_of_the_spec_by_hand():
    network, example = built("resnet")
    traced, by_hand = traced_spec(network, example), resnet_spec(network)
    assert [n for n, _ in groups(traced)] == [n for n, _ in groups(by_hand)]

    def partition(spec):
        found = {}
        for name, dimensions in spec.tensors.items():
            for number, dimension in enumerate(dimensions):
                for segment in dimension:
                    found.setdefault(segment.axis, set()).add((name, number))
        return sorted(map(sorted, found.values()))

    assert partition(traced) == partition(by_hand)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tanh", [(6, "sign")]),
        ("no activation", [(6, "nonzero")]),
        ("rms", [(6, "sign")]),
        ("vgg", [(5, "one"), (6, "one")]),
        ("small", [(6, "positive"), (10, "one")]),
        ("residual", [(8, "one"), (12, "one")]),
    ],
)
def test_which_factors_are_allowed(name, expected):
    network, example = built(name)
    assert groups(traced_spec(network, example)) == sorted(expected)


@pytest.mark.parametrize("name", ["mlp", "vgg", "resnet", "residual"])
def test_a_transformed_copy_is_matched(name):
    network, example = built(name)
    spec = traced_spec(network, example)
    a = state(network)
    b = spec.act(spec.random(torch.Generator().manual_seed(2)), a)
    assert match_weights(spec, a, b).distance < 1e-6


class Branches(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2)

    def forward(self, x):
        return self.inner(x, x, x)[0]


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.bonus = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.layer(x) * self.bonus


def test_what_cannot_be_traced():
    with pytest.raises(SymmetryError, match=r"Branches cannot be traced.*\n.*by hand"):
        traced_spec(Branches(), torch.randn(2, 3))


def test_a_module_that_is_not_known():
    with pytest.raises(SymmetryError, match=r"'inner'.*\n.*by hand"):
        traced_spec(Attention(), torch.randn(2, 3, 4))


def test_a_parameter_of_the_module_itself():
    with pytest.raises(SymmetryError, match=r"'bonus'"):
        traced_spec(Unused(), torch.randn(2, 3))


def test_several_groups_of_a_norm():
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3))
    with pytest.raises(SymmetryError, match="GroupNorm '1'"):
        traced_spec(network, torch.randn(2, 3, 8, 8))


def test_flattening_everything():
    network = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0))
    with pytest.raises(SymmetryError, match="Flatten"):
        traced_spec(network, torch.randn(2, 4))
