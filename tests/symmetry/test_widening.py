"""Narrower networks inside wider ones: they compute the same, and are found again."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from isthmus.errors import SymmetryError
from isthmus.symmetry.matching import match_weights
from isthmus.symmetry.monomial import Monomial
from isthmus.symmetry.spec import FREE, Segment, Spec, on
from isthmus.symmetry.traced import traced_spec
from isthmus.symmetry.widening import growth, widened, wider_axes


def mlp(*widths, norm=None):
    torch.manual_seed(sum(widths))
    layers = []
    for number, (few, many) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(few, many))
        if number < len(widths) - 2:
            layers += [*([] if norm is None else [norm(many)]), nn.GELU()]
    return nn.Sequential(*layers).double().eval()


def spec_of(network, inputs):
    return traced_spec(network, inputs)


def shapes(network):
    return {name: value.shape for name, value in state(network).items()}


def state(network):
    return {n: v.detach() for n, v in network.state_dict().items() if v.is_floating_point()}


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 5), st.integers(0, 5))
def test_the_function_stays(first, second, more, others):
    narrow, wide = mlp(3, first, second, 2), mlp(3, first + more, second + others, 2)
    inputs = torch.randn(9, 3, dtype=torch.float64)
    found = widened(spec_of(narrow, inputs), spec_of(wide, inputs), state(narrow), shapes(wide))
    assert {name: x.shape for name, x in found.items()} == shapes(wide)
    wanted = narrow(inputs)
    torch.testing.assert_close(
        torch.func.functional_call(wide, found, (inputs,)), wanted, rtol=1e-10, atol=1e-12
    )


def test_with_batch_norm():
    narrow, wide = mlp(3, 4, 5, 2, norm=nn.BatchNorm1d), mlp(3, 7, 5, 2, norm=nn.BatchNorm1d)
    with torch.no_grad():
        for each in narrow.modules():
            if isinstance(each, nn.BatchNorm1d):
                each.running_mean.uniform_(-1, 1)
                each.running_var.uniform_(0.5, 2)
                each.weight.uniform_(0.5, 2)
                each.bias.uniform_(-1, 1)
    inputs = torch.randn(9, 3, dtype=torch.float64)
    specs = [spec_of(each, inputs) for each in (narrow, wide)]
    found = widened(*specs, state(narrow), shapes(wide))
    assert torch.equal(found["1.running_var"][4:], torch.ones(3, dtype=torch.float64))
    for name, value in found.items():
        if name != "1.running_var" and value.shape[0] == 7:
            assert (value[4:] == 0).all(), name
    torch.testing.assert_close(
        torch.func.functional_call(wide, found, (inputs,)), narrow(inputs), rtol=1e-10, atol=1e-12
    )


def test_flattened_channels_grow_in_blocks():
    def network(channels):
        torch.manual_seed(channels)
        return nn.Sequential(
            nn.Conv2d(1, channels, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * channels, 2)
        ).double()

    narrow, wide = network(3), network(5)
    inputs = torch.randn(6, 1, 4, 4, dtype=torch.float64)
    found = widened(spec_of(narrow, inputs), spec_of(wide, inputs), state(narrow), shapes(wide))
    assert torch.equal(found["3.weight"][:, :12], narrow[3].weight)
    torch.testing.assert_close(
        torch.func.functional_call(wide, found, (inputs,)), narrow(inputs), rtol=1e-10, atol=1e-12
    )


def test_parts_of_one_tensor_grow_each_in_its_place():
    """As gates and values that one matrix makes."""

    def spec(units):
        halves = (
            Segment("mlp", positions=slice(0, units)),
            Segment("mlp", positions=slice(units, 2 * units)),
        )
        return Spec(
            {"mlp": Monomial(units)}, {"up": (halves, FREE), "down": (FREE, on("mlp", "dual"))}
        )

    narrow = {"up": torch.arange(8.0).reshape(4, 2), "down": torch.ones(3, 2)}
    wide = {"up": (6, 2), "down": (3, 3)}
    found = widened(spec(2), spec(3), narrow, wide)
    zero = torch.zeros(1, 2)
    expected = torch.cat([narrow["up"][:2], zero, narrow["up"][2:], zero])
    assert torch.equal(found["up"], expected)
    assert torch.equal(found["down"], torch.tensor([[1.0, 1, 0]] * 3))


def test_units_that_were_taken_away_are_found_again():
    """A wide network next to one that lacks some of its units, the rest in another order."""
    wide = mlp(4, 12, 10, 3)
    generator = torch.Generator().manual_seed(0)
    kept = [torch.randperm(size, generator=generator)[: size - 3] for size in (12, 10)]
    with torch.no_grad():
        for layer, rows in ((wide[2], kept[0]), (wide[4], kept[1])):
            # What is taken away has no effect in the wide one either, so that both compute the same.
            gone = torch.ones(layer.in_features, dtype=torch.bool)
            gone[rows] = False
            layer.weight[:, gone] = 0
    narrow = mlp(4, 9, 7, 3)
    with torch.no_grad():
        narrow[0].weight.copy_(wide[0].weight[kept[0]])
        narrow[0].bias.copy_(wide[0].bias[kept[0]])
        narrow[2].weight.copy_(wide[2].weight[kept[1]][:, kept[0]])
        narrow[2].bias.copy_(wide[2].bias[kept[1]])
        narrow[4].weight.copy_(wide[4].weight[:, kept[1]])
        narrow[4].bias.copy_(wide[4].bias)
    inputs = torch.randn(9, 4, dtype=torch.float64)
    torch.testing.assert_close(narrow(inputs), wide(inputs))
    small, large = spec_of(narrow, inputs), spec_of(wide, inputs)
    grown = widened(small, large, state(narrow), shapes(wide))
    found = match_weights(large, state(wide), grown)
    moved = large.act(found.element, grown)
    for name, places in (("0.weight", kept[0]), ("0.bias", kept[0])):
        torch.testing.assert_close(moved[name][places], state(wide)[name][places])
    torch.testing.assert_close(moved["4.weight"], wide[4].weight)
    torch.testing.assert_close(torch.func.functional_call(wide, moved, (inputs,)), wide(inputs))


def test_axes_that_grow_are_named():
    inputs = torch.randn(2, 3, dtype=torch.float64)
    small, large = (spec_of(mlp(3, 4, width, 2), inputs) for width in (5, 8))
    assert len(wider_axes(small, large)) == 1
    assert wider_axes(small, small) == ()


@pytest.mark.parametrize(
    ("narrow", "wide", "words"),
    [
        (mlp(3, 6, 2), mlp(3, 4, 2), "Swap the networks"),
        (mlp(3, 6, 4, 2), mlp(3, 5, 8, 2), "Swap the networks"),
        (mlp(3, 4, 2, norm=nn.LayerNorm), mlp(3, 6, 2, norm=nn.LayerNorm), "runs over it"),
        (mlp(3, 4, 2), mlp(3, 4, 4, 2), "has the axis"),
    ],
    ids=["wider", "wider and narrower", "LayerNorm", "deeper"],
)
def test_what_cannot_grow(narrow, wide, words):
    inputs = torch.randn(2, 3, dtype=torch.float64)
    with pytest.raises(SymmetryError, match=words):
        wider_axes(spec_of(narrow, inputs), spec_of(wide, inputs))


def test_inputs_and_outputs_do_not_grow():
    small, large = mlp(3, 4, 2), mlp(3, 6, 5)
    inputs = torch.randn(2, 3, dtype=torch.float64)
    specs = spec_of(small, inputs), spec_of(large, inputs)
    with pytest.raises(SymmetryError, match="not because of units that could be added"):
        growth("2.weight", (2, 4), *specs, (5, 6))
    with pytest.raises(SymmetryError, match="not because of units that could be added"):
        widened(*specs, state(small), shapes(large))
