"""Shapes, sizes and symmetries of the lab's small networks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from isthmus.lab.networks.densenets import DenseNet
from isthmus.lab.networks.mlps import mlp, mlp_spec
from isthmus.lab.networks.resnets import ResNet, learned, resnet_spec
from isthmus.lab.networks.state import seeded, state
from isthmus.lab.networks.transformers import ByteDecoder, VisionTransformer
from isthmus.lab.noise.networks import head_of, scale_invariant


def pictures(side=8, count=6):
    return torch.randn(count, 1, side, side, generator=torch.Generator().manual_seed(0))


NETWORKS = {
    "resnet": lambda: ResNet(4, 1, "batch", classes=7),
    "deep resnet": lambda: ResNet(2, 2, "layer", classes=7, stages=4),
    "densenet": lambda: DenseNet(4, 2, classes=7),
    "vit": lambda: VisionTransformer(8, 2, 16, 1, classes=7),
    "mlp": lambda: nn.Sequential(nn.Flatten(), *mlp(64, 8, 2, 7)),
}


@pytest.mark.parametrize("made", NETWORKS.values(), ids=NETWORKS)
def test_logits_of_every_picture_and_a_gradient_of_every_weight(made):
    seeded(0)
    network = made()
    logits = network(pictures())
    assert logits.shape == (6, 7)
    nn.functional.cross_entropy(logits, torch.arange(6)).backward()
    still = [name for name, each in network.named_parameters() if each.grad is None]
    assert not still
    assert head_of(network).out_features == 7


@pytest.mark.parametrize("made", NETWORKS.values(), ids=NETWORKS)
def test_pictures_do_not_see_each_other_once_trained(made):
    seeded(0)
    network = made().eval()
    with torch.no_grad():
        together, alone = network(pictures()), network(pictures()[:1])
    torch.testing.assert_close(together[:1], alone)


@pytest.mark.parametrize("made", NETWORKS.values(), ids=NETWORKS)
def test_the_seed_decides_the_start(made):
    starts = []
    for seed in (3, 3, 4):
        seeded(seed)
        starts.append(state(made()))
    assert all(torch.equal(starts[0][name], value) for name, value in starts[1].items())
    assert any(not torch.equal(starts[0][name], value) for name, value in starts[2].items())


def test_a_state_is_a_copy():
    network = mlp(4, 3, 1, 2)
    before = state(network)
    with torch.no_grad():
        network[0].weight.add_(1)
    assert not torch.equal(before["0.weight"], network.state_dict()["0.weight"])


def test_the_mlp_by_its_formula():
    seeded(1)
    network = mlp(5, 4, 2, 3)
    x = torch.randn(7, 5)
    w = state(network)
    by_hand = x
    for layer in (0, 2):
        by_hand = (by_hand @ w[f"{layer}.weight"].T + w[f"{layer}.bias"]).clamp(min=0)
    by_hand = by_hand @ w["4.weight"].T + w["4.bias"]
    torch.testing.assert_close(network(x), by_hand)


def test_widths_of_a_densenet():
    """Huang et al.: each layer adds `growth`, each transition halves."""
    network = DenseNet(growth=6, layers=2)
    # 12 from the stem, + 12, halved, + 12, halved, + 12
    assert network.last_norm.num_features == 24 // 2 // 2 + 12 // 2 + 12
    assert network.head.in_features == network.last_norm.num_features
    assert len(network.blocks) == 3


def test_a_resnet_of_four_stages_and_two_blocks_is_as_deep_as_resnet_18():
    network = ResNet(2, 2, "batch", stages=4)
    deep = [
        each
        for each in network.modules()
        if isinstance(each, nn.Conv2d) and each.kernel_size == (3, 3)
    ]
    # With the head, 18 layers; the 1 x 1 convolutions between stages are not counted there either.
    assert len(deep) + 1 == 18


@pytest.mark.parametrize(
    ("network", "spec", "inputs"),
    [
        (mlp(64, 6, 2, 3), mlp_spec(6, 2), pictures().flatten(1)),
        (r := ResNet(3, 2, "batch"), resnet_spec(r), pictures()),
        (r := ResNet(3, 1, "layer"), resnet_spec(r), pictures()),
    ],
    ids=["mlp", "resnet", "resnet with layer norm"],
)
def test_symmetries_change_the_weights_and_not_the_function(network, spec, inputs):
    with torch.no_grad():
        network.train()
        for _ in range(3):  # running statistics that are not all alike
            network(inputs + torch.randn_like(inputs))
        for each in network.parameters():
            each.add_(0.1 * torch.randn_like(each))
    network.eval()
    weights = state(network)
    assert set(spec.tensors) == set(weights)
    element = {
        name: group.random(torch.Generator().manual_seed(len(name)))
        if hasattr(group, "random")
        else None
        for name, group in spec.axes.items()
    }
    moved = spec.act(element, weights)
    assert any(not torch.equal(moved[name], value) for name, value in weights.items())
    other = copy.deepcopy(network)
    other.load_state_dict(moved)
    with torch.no_grad():
        torch.testing.assert_close(other(inputs), network(inputs), rtol=1e-4, atol=1e-5)


def test_learned_symmetries_leave_running_statistics_out():
    network = ResNet(2, 1, "batch")
    assert set(learned(resnet_spec(network)).tensors) == {
        name for name, _ in network.named_parameters()
    }


@pytest.mark.parametrize("network", [ResNet(4, 2, "batch"), DenseNet(4, 2)], ids=["res", "dense"])
def test_scale_invariant_weights_can_be_scaled(network):
    found = scale_invariant(network)
    assert found
    network.train()
    with torch.no_grad():
        before = network(pictures())
        for weight in found.values():
            weight.mul_(3)
        torch.testing.assert_close(network(pictures()), before, rtol=1e-3, atol=1e-3)
        network.head.weight.mul_(3)
        assert (network(pictures()) - before).abs().max() > 0.01


def test_beside_the_stem_no_other_weight_of_a_resnet_is_scale_invariant():
    network = ResNet(4, 1, "batch").train()
    found = scale_invariant(network)
    with torch.no_grad():
        before = network(pictures())
        for name, weight in network.named_parameters():
            if weight.ndim == 4 and name not in (*found, "stem.weight"):
                weight.mul_(3)
                assert (network(pictures()) - before).abs().max() > 1e-3, name
                weight.div_(3)


def test_a_decoder_does_not_see_what_follows():
    seeded(0)
    network = ByteDecoder(32, 2, 12).eval()
    x = torch.randint(0, 256, (3, 12))
    changed = x.clone()
    changed[:, 7:] = 255 - changed[:, 7:]
    with torch.no_grad():
        one, other = network(x), network(changed)
    assert one.shape == (3, 12, 256)
    torch.testing.assert_close(one[:, :7], other[:, :7])
    assert not torch.allclose(one[:, 7:], other[:, 7:])


def test_nothing_is_dropped_in_training():
    seeded(0)
    for network, x in (
        (ByteDecoder(16, 1, 5), torch.randint(0, 256, (2, 5))),
        (VisionTransformer(8, 4, 16, 1), pictures()),
    ):
        network.train()
        torch.testing.assert_close(network(x), network(x))
