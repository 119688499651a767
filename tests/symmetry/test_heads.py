"""Heads: the best of all orders, and attention that does not notice."""

from itertools import permutations, product

import pytest
import torch

from isthmus.symmetry.group import Group
from isthmus.symmetry.heads import Heads, HeadsMoved
from isthmus.symmetry.identity import Identity
from isthmus.symmetry.matrix_groups import GeneralLinear
from isthmus.symmetry.rope import PlaneSigns, RopeCommutant, planes
from tests.symmetry.networks import seeded

SIZE = 4


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("groups", "queries"), [(3, 1), (2, 2), (1, 3), (2, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_the_match_is_the_best_of_all_elements(groups, queries, seed):
    heads = Heads(groups, queries, PlaneSigns(2), Identity(2))
    generator = seeded(seed)
    crosses = {role: normal(generator, *[heads.size(role)] * 2) for role in heads.roles}
    everything = product(
        permutations(range(groups)),
        product(permutations(range(queries)), repeat=groups),
        product((1.0, -1.0), repeat=groups),
    )
    best = max(
        Group.score(
            heads,
            HeadsMoved(
                torch.tensor(order),
                torch.tensor(inside),
                tuple(torch.tensor([sign], dtype=torch.float64) for sign in signs),
                (None,) * groups,
            ),
            crosses,
        )
        for order, inside, signs in everything
    )
    assert heads.score(heads.match(crosses), crosses) == pytest.approx(best)


def test_heads_of_one_role_in_place_stay():
    heads = Heads(3, 2, RopeCommutant(SIZE), GeneralLinear(SIZE), permuted=False)
    g = heads.match({"key": normal(seeded(0), 12, 12), "output": normal(seeded(1), 24, 24)})
    assert g.order.tolist() == [0, 1, 2]
    assert g.heads.tolist() == [[0, 1]] * 3


def attention(p, x, groups, queries, layout):
    """Causal attention with RoPE and grouped queries, from its definition."""
    length = len(x)
    q = (x @ p["q"].T + p["q_bias"]).reshape(length, groups, queries, SIZE)
    k = (x @ p["k"].T + p["k_bias"]).reshape(length, groups, SIZE)
    v = (x @ p["v"].T).reshape(length, groups, SIZE)
    first, second = planes(SIZE, layout)
    angles = torch.arange(length, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1])
    angles = angles.to(torch.float64)

    def turned(h):
        shape = (length, *(1 for _ in h.shape[1:-1]), SIZE // 2)
        cos, sin = angles.cos().reshape(shape), angles.sin().reshape(shape)
        out = torch.empty_like(h)
        out[..., first] = cos * h[..., first] - sin * h[..., second]
        out[..., second] = sin * h[..., first] + cos * h[..., second]
        return out

    scores = torch.einsum("tgqd,sgd->gqts", turned(q), turned(k)) / SIZE**0.5
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(mask, float("-inf")).softmax(dim=-1)
    read = torch.einsum("gqts,sgd->tgqd", weights, v).reshape(length, -1)
    return read @ p["o"].T


def parameters(groups, queries, generator, width=6):
    return {
        "q": normal(generator, groups * queries * SIZE, width),
        "q_bias": normal(generator, groups * queries * SIZE),
        "k": normal(generator, groups * SIZE, width),
        "k_bias": normal(generator, groups * SIZE),
        "v": normal(generator, groups * SIZE, width),
        "o": normal(generator, width, groups * queries * SIZE),
    }


def moved(heads, g, p):
    roles = {"q": "query", "q_bias": "query", "k": "key", "k_bias": "key", "v": "value"}
    result = {name: heads.act(g, p[name], role) for name, role in roles.items()}
    return {**result, "o": heads.act(g, p["o"].T, "output").T}


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("groups", "queries"), [(4, 1), (2, 3), (1, 4)])
def test_attention_does_not_notice(groups, queries, layout):
    generator = seeded(groups)
    heads = Heads(groups, queries, RopeCommutant(SIZE, layout=layout), GeneralLinear(SIZE))
    p, x = parameters(groups, queries, generator), normal(generator, 7, 6)
    expected = attention(p, x, groups, queries, layout)
    for _ in range(3):
        q = moved(heads, heads.random(generator), p)
        assert (q["q"] - p["q"]).norm() > 0.1
        torch.testing.assert_close(
            attention(q, x, groups, queries, layout), expected, rtol=1e-9, atol=1e-9
        )
    # A larger group is noticed: any invertible matrix on keys and queries, or the other layout.
    other = "interleaved" if layout == "half" else "half"
    for key in (GeneralLinear(SIZE), RopeCommutant(SIZE, layout=other)):
        wrong = Heads(groups, queries, key, GeneralLinear(SIZE))
        q = moved(wrong, wrong.random(generator), p)
        assert (attention(q, x, groups, queries, layout) - expected).norm() > 0.01 * expected.norm()
