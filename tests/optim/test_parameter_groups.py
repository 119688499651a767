"""Parameters sorted by what they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isthmus.errors import TrainingError
from isthmus.optim.lion_k import LionK, Muon
from isthmus.optim.parameter_groups import parameter_groups

from ..models.networks import build


def by_name(groups):
    return {
        name: (group["kind"], group.get("transposed", False), group.get("split"))
        for group in groups
        for name in group["names"]
    }


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "bert_masked", "vit"])
def test_every_parameter_has_one_group(name):
    network = build(name)
    groups = parameter_groups(network)
    members = [parameter for group in groups for parameter in group["params"]]
    assert len(members) == len({id(p) for p in members}) == len(list(network.parameters()))
    assert set(by_name(groups)) == {n for n, _ in network.named_parameters()}
    for group in groups:
        assert [dict(network.named_parameters())[n] for n in group["names"]] == group["params"]


def test_gpt2_is_transposed_fused_and_tied():
    found = by_name(parameter_groups(build("gpt2")))
    block = "transformer.h.0"
    assert found[f"{block}.attn.c_attn.weight"] == ("matrices", True, (16, 16, 16))
    assert found[f"{block}.mlp.c_fc.weight"] == ("matrices", True, None)
    assert found[f"{block}.ln_1.weight"] == ("vectors", False, None)
    assert found["transformer.wte.weight"] == ("embeddings", False, None)
    assert "lm_head.weight" not in found


def test_heads_and_embeddings_of_others():
    llama = by_name(parameter_groups(build("llama")))
    assert llama["lm_head.weight"][0] == "heads"
    assert llama["model.embed_tokens.weight"][0] == "embeddings"
    assert llama["model.layers.0.self_attn.k_proj.weight"] == ("matrices", False, None)
    vit = by_name(parameter_groups(build("vit")))
    assert vit["classifier.weight"][0] == "heads"
    assert vit["classifier.bias"][0] == "vectors"
    assert vit["vit.embeddings.cls_token"][0] == "embeddings"
    assert vit["vit.embeddings.patch_embeddings.projection.weight"][0] == "matrices"


def test_convolutions():
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ConvTranspose2d(8, 4, 3),
        nn.Conv2d(4, 6, 3, groups=2),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.BatchNorm2d(6),
    )
    found = by_name(parameter_groups(network))
    assert found["0.weight"] == ("matrices", False, None)
    assert found["1.weight"] == ("matrices", True, None)
    assert found["2.weight"] == ("matrices", False, (3, 3))
    assert found["3.weight"][0] == found["4.weight"][0] == "vectors"


def test_a_transposed_convolution_is_the_matrix_of_its_outputs():
    layer = nn.ConvTranspose2d(8, 4, 3, bias=False).double()
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0)).double()
    Muon(parameter_groups(layer), 1.0, weight_decay=0.0, adjust="none", polar="svd").step()
    update = (layer.weight.detach() - before).transpose(0, 1).flatten(1)
    assert torch.allclose(torch.linalg.svdvals(update), torch.ones(4).double())


class Attention(nn.Module):
    def __init__(self, name: str, outputs: int) -> None:
        super().__init__()
        self.add_module(name, nn.Linear(4, outputs, bias=False))


def test_fused_weights():
    for name, outputs, parts in (("qkv", 12, (4,) * 3), ("gate_up_proj", 14, (7,) * 2)):
        assert by_name(parameter_groups(Attention(name, outputs)))[f"{name}.weight"][2] == parts
    attention = by_name(parameter_groups(nn.MultiheadAttention(4, 2)))
    assert attention["in_proj_weight"] == ("matrices", False, (4, 4, 4))
    grouped = parameter_groups(Attention("qkv_proj", 8), fused={"qkv_proj": (4, 2, 2)})
    assert by_name(grouped)["qkv_proj.weight"][2] == (4, 2, 2)
    whole = parameter_groups(Attention("qkv", 12), fused={"qkv": 1})
    assert by_name(whole)["qkv.weight"][2] is None


@pytest.mark.parametrize(
    ("name", "outputs", "layout"),
    [("qkv_proj", 8, "unequal size"), ("query_key_value", 12, "head by head")],
)
def test_fused_weights_that_no_shape_tells(name, outputs, layout):
    with pytest.raises(TrainingError, match=rf"{name}.weight has shape .* matrices .*{layout}"):
        parameter_groups(Attention(name, outputs))


def test_fused_parts_that_do_not_fit():
    with pytest.raises(TrainingError, match="8 outputs, which are not 3 equal"):
        parameter_groups(Attention("mixed", 8), fused={"mixed": 3})
    with pytest.raises(TrainingError, match="do not split"):
        LionK(parameter_groups(Attention("mixed", 8), fused={"mixed": (3, 4)}))


def test_settings_heads_and_frozen_parameters():
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    network[0].bias.requires_grad_(False)
    groups = parameter_groups(
        network, settings={"vectors": {"weight_decay": 0.0}, "heads": {"lr": 0.5}}, heads=["2"]
    )
    found = by_name(groups)
    assert {name: kind for name, (kind, _, _) in found.items()} == {
        "0.weight": "matrices",
        "2.weight": "heads",
        "2.bias": "vectors",
    }
    optimizer = LionK(groups, 0.1, weight_decay=1.0)
    told = {g["kind"]: (g["norm"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups}
    assert told == {
        "matrices": ("nuclear", 0.1, 1.0),
        "heads": ("l1", 0.5, 1.0),
        "vectors": ("l1", 0.1, 0.0),
    }


def test_bad_input():
    network = nn.Linear(3, 2)
    with pytest.raises(TrainingError, match="no module 'top'"):
        parameter_groups(network, heads=["top"])
    with pytest.raises(TrainingError, match="kind 'biases'"):
        parameter_groups(network, settings={"biases": {}})
    with pytest.raises(TrainingError, match="no parameter that needs a gradient"):
        parameter_groups(network.requires_grad_(False))
