"""Blocks of architectures as their papers define them, and of networks that have none."""

from __future__ import annotations

import pytest
from torch import nn

from isthmus.errors import CalibrationError
from isthmus.models.blocks import find_blocks, given_blocks

from .networks import LAYERS, NAMES, build


@pytest.mark.parametrize("name", NAMES)
def test_blocks_before_and_after_are_the_whole_network(name):
    network = build(name)
    found = find_blocks(network)
    assert len(found.names) == LAYERS
    assert len({type(network.get_submodule(block)) for block in found.names}) == 1
    inside = [p for block in found.names for p in network.get_submodule(block).parameters()]
    outside = [
        p
        for part in (*found.before, *found.after)
        for p in network.get_submodule(part).parameters(recurse=False)
    ]
    assert {id(p) for p in inside} | {id(p) for p in outside} == {
        id(p) for p in network.parameters()
    }
    assert not {id(p) for p in inside} & {id(p) for p in outside}


def test_embeddings_come_before_and_heads_after():
    found = find_blocks(build("llama"))
    assert found.before == ("model.embed_tokens",)
    assert found.after == ("model.norm", "lm_head")
    assert found.names == tuple(f"model.layers.{i}" for i in range(LAYERS))


def test_the_list_with_most_parameters_is_taken_not_a_list_inside_it():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4) for _ in range(9)])

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList([nn.Linear(4, 4) for _ in range(12)])
            self.blocks = nn.ModuleList([Block() for _ in range(2)])

    assert find_blocks(Network()).names == ("blocks.0", "blocks.1")


def test_a_network_without_blocks():
    with pytest.raises(CalibrationError, match="no repeated blocks"):
        find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))


def test_given_blocks_keep_their_order():
    network = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2))
    found = given_blocks(network, ["2"])
    assert (found.before, found.names, found.after) == (("0",), ("2",), ("3",))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no blocks are named"),
        (["7"], "no module '7'"),
        (["0", "0"], "named twice"),
        (["0", "0.0"], "holds another"),
    ],
)
def test_given_blocks_that_cannot_be(names, message):
    network = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(CalibrationError, match=message):
        given_blocks(network, names)
