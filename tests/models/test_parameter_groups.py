"""Groups of parameters: what one would say by hand of networks of Transformers."""

from __future__ import annotations

import pytest
import torch

from isthmus.errors import CalibrationError
from isthmus.models.parameter_groups import GROUPINGS, parameter_groups

from .networks import LAYERS, NAMES, build


def groups_of(name, grouping):
    body = build(name).base_model
    names = [name for name, _ in body.named_parameters()]
    return names, parameter_groups(body, names, grouping)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_has_one_group(name, grouping):
    names, groups = groups_of(name, grouping)
    assert sorted(part for group in groups.values() for part in group) == sorted(names)
    assert all(groups.values())


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("llama", {"embed_tokens.weight"}, {"norm.weight"}),
        ("gpt2", {"wte.weight", "wpe.weight"}, {"ln_f.weight", "ln_f.bias"}),
        ("vit", None, {"layernorm.weight", "layernorm.bias", "pooler.dense.weight"}),
        ("bert", None, {"pooler.dense.weight", "pooler.dense.bias"}),
    ],
)
def test_blocks(name, before, after):
    _, groups = groups_of(name, "blocks")
    assert len(groups) == LAYERS + 2
    assert before is None or set(groups["before"]) == before
    assert set(groups["after"]) & after == set(groups["after"])


@pytest.mark.parametrize(
    ("name", "attention", "mlp", "rest"),
    [
        (
            "llama",
            "self_attn.q_proj.weight",
            "mlp.up_proj.weight",
            "post_attention_layernorm.weight",
        ),
        ("gpt2", "attn.c_attn.weight", "mlp.c_fc.weight", "ln_1.weight"),
        ("bert", "attention.self.query.bias", "intermediate.dense.weight", None),
        ("bert", "attention.output.LayerNorm.bias", "output.LayerNorm.bias", None),
    ],
)
def test_modules(name, attention, mlp, rest):
    names, groups = groups_of(name, "modules")
    block = next(group for group in groups if group not in {"before", "after"}).partition(":")[0]
    kinds = {"attention": attention, "mlp": mlp, "rest": rest}
    expected = {f"{block}: {kind}": part for kind, part in kinds.items() if part is not None}
    assert {group for group in groups if group.startswith(f"{block}:")} == set(expected)
    for group, part in expected.items():
        assert f"{block}.{part}" in groups[group]
        assert f"{block}.{part}" in names


def test_no_names_make_no_group():
    assert parameter_groups(torch.nn.Linear(2, 2), [], "scalar") == {}


def test_an_unknown_grouping():
    with pytest.raises(CalibrationError, match=r"heads.*\n.*scalar, blocks, modules"):
        parameter_groups(build("bert"), ["x"], "heads")


def test_no_blocks():
    with pytest.raises(CalibrationError, match="no repeated blocks"):
        parameter_groups(torch.nn.Linear(2, 2), ["weight"], "blocks")
