"""Axioms that hold for every group, and what `match` and `balance` promise."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import orthogonal_procrustes
from scipy.optimize import minimize

from isthmus.errors import SymmetryError
from isthmus.symmetry.heads import Heads
from isthmus.symmetry.identity import Identity
from isthmus.symmetry.matrix_groups import GeneralLinear, Orthogonal
from isthmus.symmetry.monomial import Monomial
from isthmus.symmetry.rope import PlaneSigns, RopeCommutant, planes

GROUPS = {
    **{f"monomial {kind}": Monomial(5, kind) for kind in ("one", "sign", "positive", "nonzero")},
    "diagonal": Monomial(4, "nonzero", permuted=False),
    "orthogonal": Orthogonal(5),
    "keeps mean": Orthogonal(5, keeps_mean=True),
    "gl": GeneralLinear(4),
    "rope": RopeCommutant(6),
    "rope interleaved": RopeCommutant(6, layout="interleaved"),
    "rope partial": RopeCommutant(7, 4),
    "rope partial interleaved": RopeCommutant(7, 4, "interleaved"),
    "signs": PlaneSigns(6),
    "signs partial": PlaneSigns(7, 4, "interleaved"),
    "identity": Identity(4),
    "heads": Heads(3, 1, GeneralLinear(2), GeneralLinear(3)),
    "grouped heads": Heads(2, 3, RopeCommutant(4), GeneralLinear(3)),
    "normed heads": Heads(2, 2, PlaneSigns(4, 2), Identity(3)),
    "heads in place": Heads(2, 3, RopeCommutant(4), Orthogonal(3), permuted=False),
    "many queries": Heads(2, 4, RopeCommutant(2), GeneralLinear(2)),
}
DUALS = {"dual": "vector", "query": "key", "output": "value"}

everywhere = pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())
seeds = given(st.integers(0, 10_000))
few = settings(max_examples=6, deadline=None)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def matrix(group, g, role):
    return group.act(g, torch.eye(group.size(role), dtype=torch.float64), role)


def same(group, g, h):
    for role in group.roles:
        torch.testing.assert_close(matrix(group, g, role), matrix(group, h, role))


def tensors(group, generator, columns=6):
    return {r: normal(generator, group.size(r), columns) for r in sorted(group.roles)}


def crosses_of(a, b):
    return {role: a[role] @ b[role].T for role in a}


def squares_of(group, rows):
    grams = {role: x @ x.T for role, x in rows.items()}
    if group.balance_needs == "diagonal":
        return {role: gram.diagonal() for role, gram in grams.items()}
    return grams


def norm(rows):
    return sum(float(x.square().sum()) for x in rows.values())


@everywhere
@few
@seeds
def test_group_axioms(group, seed):
    generator = seeded(seed)
    g, h, k = (group.random(generator) for _ in range(3))
    same(group, group.compose(g, group.compose(h, k)), group.compose(group.compose(g, h), k))
    same(group, group.compose(g, group.inverse(g)), group.identity())
    same(group, group.compose(group.inverse(g), g), group.identity())
    same(group, group.compose(group.identity(), g), g)


@everywhere
@few
@seeds
def test_every_role_is_a_representation(group, seed):
    generator = seeded(seed)
    g, h = group.random(generator), group.random(generator)
    for role in group.roles:
        x = normal(generator, group.size(role), 2, 3)
        composed = group.act(group.compose(g, h), x, role)
        torch.testing.assert_close(composed, group.act(g, group.act(h, x, role), role))
        torch.testing.assert_close(group.act(group.identity(), x, role), x)
        bias = normal(generator, group.size(role))
        torch.testing.assert_close(
            group.act(g, bias, role), group.act(g, bias[:, None], role)[:, 0]
        )
        assert group.act(g, x.float(), role).dtype == torch.float32


@everywhere
@few
@seeds
def test_duals_read_what_vectors_write(group, seed):
    generator = seeded(seed)
    g = group.random(generator)
    for dual, vector in DUALS.items():
        if dual not in group.roles:
            continue
        y = normal(generator, group.size(vector))
        if isinstance(group, Heads):
            # Every head of queries reads the one head of keys of its group.
            x = normal(generator, group.groups, group.queries, group.size(vector) // group.groups)
            moved = group.act(g, x.reshape(-1), dual).reshape(x.shape)
            read = (x * y.reshape(group.groups, 1, -1)).sum(-1)
            after = (moved * group.act(g, y, vector).reshape(group.groups, 1, -1)).sum(-1)
            expected = torch.stack([read[o][h] for o, h in zip(g.order, g.heads, strict=True)])
            torch.testing.assert_close(after, expected)
        else:
            x = normal(generator, group.size(dual))
            torch.testing.assert_close(
                group.act(g, x, dual) @ group.act(g, y, vector), x @ y, rtol=1e-9, atol=1e-9
            )


@everywhere
@few
@seeds
def test_compact_groups_and_matches_keep_norms(group, seed):
    generator = seeded(seed)
    a, b = tensors(group, generator), tensors(group, generator)
    elements = [group.match(crosses_of(a, b))]
    if group.compact:
        elements.append(group.random(generator))
    for g in elements:
        for role, x in b.items():
            torch.testing.assert_close(group.act(g, x, role).norm(), x.norm())


@everywhere
@few
@seeds
def test_the_score_is_the_inner_product_with_what_acts(group, seed):
    generator = seeded(seed)
    a, b = tensors(group, generator), tensors(group, generator)
    g = group.match(crosses_of(a, b))
    expected = sum(float((a[role] * group.act(g, b[role], role)).sum()) for role in a)
    assert group.score(g, crosses_of(a, b)) == pytest.approx(expected, abs=1e-9)
    one = sorted(group.roles)[0]
    partial_score = group.score(g, {one: crosses_of(a, b)[one]})
    assert partial_score == pytest.approx(float((a[one] * group.act(g, b[one], one)).sum()))


@everywhere
@few
@seeds
def test_no_random_element_matches_better(group, seed):
    generator = seeded(seed)
    crosses = crosses_of(tensors(group, generator), tensors(group, generator))
    found = group.score(group.match(crosses), crosses)
    for _ in range(20):
        # `match` of noise is a random element of the compact subgroup.
        noise = {role: normal(generator, *c.shape) for role, c in crosses.items()}
        other = group.match(noise)
        assert group.score(other, crosses) <= found + 1e-9


@everywhere
@few
@seeds
def test_a_compact_change_is_recovered(group, seed):
    generator = seeded(seed)
    a = tensors(group, generator, columns=30)
    c = group.match({role: normal(generator, len(x), len(x)) for role, x in a.items()})
    b = {role: group.act(c, x, role) for role, x in a.items()}
    g = group.match(crosses_of(a, b))
    for role, x in b.items():
        torch.testing.assert_close(group.act(g, x, role), a[role])


@everywhere
@few
@seeds
def test_balancing_lowers_the_norm_and_is_idempotent(group, seed):
    generator = seeded(seed)
    rows = tensors(group, generator)
    for start in (group.identity(), group.random(generator)):
        moved = {role: group.act(start, x, role) for role, x in rows.items()}
        g = group.balance(squares_of(group, moved))
        balanced = {role: group.act(g, x, role) for role, x in moved.items()}
        assert norm(balanced) <= norm(moved) * (1 + 1e-12)
        again = group.balance(squares_of(group, balanced))
        for role, x in balanced.items():
            torch.testing.assert_close(group.act(again, x, role), x, rtol=1e-6, atol=1e-6)
        for _ in range(10):
            nudge = group.random(generator)
            elsewhere = {role: group.act(nudge, x, role) for role, x in balanced.items()}
            assert norm(balanced) <= norm(elsewhere) * (1 + 1e-8)


@everywhere
@few
@seeds
def test_balanced_copies_differ_by_what_match_finds(group, seed):
    generator = seeded(seed)
    a = tensors(group, generator, columns=30)
    change = group.random(generator)
    b = {role: group.act(change, x, role) for role, x in a.items()}
    a, b = (
        {
            role: group.act(group.balance(squares_of(group, rows)), x, role)
            for role, x in rows.items()
        }
        for rows in (a, b)
    )
    g = group.match(crosses_of(a, b))
    for role, x in b.items():
        torch.testing.assert_close(group.act(g, x, role), a[role], rtol=1e-6, atol=1e-6)


@few
@seeds
def test_the_balance_of_gl_is_the_minimum_that_scipy_finds(seed):
    generator = seeded(seed)
    n = 3
    group = GeneralLinear(n)
    rows = {"vector": normal(generator, n, 5), "dual": normal(generator, n, 5)}

    def value_and_slope(flat):
        x = torch.from_numpy(flat.reshape(n, n)).requires_grad_()
        g = torch.matrix_exp(x)
        value = sum(group.act(g, part, role).square().sum() for role, part in rows.items())
        value.backward()
        return value.item(), x.grad.flatten().numpy()

    start = torch.zeros(n * n, dtype=torch.float64).numpy()
    found = minimize(value_and_slope, start, jac=True, method="L-BFGS-B", options={"ftol": 1e-13})
    g = group.balance(squares_of(group, rows))
    least = norm({role: group.act(g, x, role) for role, x in rows.items()})
    assert least == pytest.approx(found.fun, rel=1e-6)


@few
@seeds
def test_orthogonal_matching_agrees_with_scipy(seed):
    generator = seeded(seed)
    a, b = normal(generator, 5, 9), normal(generator, 5, 9)
    expected = orthogonal_procrustes(b.T.numpy(), a.T.numpy())[0].T
    found = Orthogonal(5).match({"vector": a @ b.T})
    torch.testing.assert_close(found, torch.from_numpy(expected.copy()))


@few
@given(st.integers(0, 10_000), st.sampled_from(["one", "sign"]))
def test_assignments_beat_brute_force(seed, factors):
    generator = seeded(seed)
    group = Monomial(4, factors)
    crosses = {role: normal(generator, 4, 4) for role in group.roles}
    signs = [(1.0,) * 4] if factors == "one" else itertools.product((1.0, -1.0), repeat=4)
    everything = itertools.product(itertools.permutations(range(4)), list(signs))
    best = max(
        group.score(
            type(group.identity())(torch.tensor(order), torch.tensor(s, dtype=torch.float64)),
            crosses,
        )
        for order, s in everything
    )
    assert group.score(group.match(crosses), crosses) == pytest.approx(best)


def rotation(angles, layout, size):
    """What RoPE does to a head at one position, built from its definition."""
    turn = torch.eye(size, dtype=torch.float64)
    for (i, j), angle in zip(planes(2 * len(angles), layout).T.tolist(), angles, strict=True):
        c, s = angle.cos(), angle.sin()
        turn[i, i], turn[j, j], turn[i, j], turn[j, i] = c, c, -s, s
    return turn


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("kind", [RopeCommutant, PlaneSigns])
@pytest.mark.parametrize(("size", "rotary"), [(8, 8), (8, 4), (7, 6)])
def test_rope_groups_commute_with_every_rotation(kind, layout, size, rotary):
    generator = seeded(1)
    group = kind(size, rotary, layout)
    generic = Orthogonal(size).random(generator)
    other = "interleaved" if layout == "half" else "half"
    for position in range(1, 4):
        angles = position * 10.0 ** -torch.arange(rotary // 2, dtype=torch.float64)
        turn = rotation(angles, layout, size)
        for role in group.roles:
            g = matrix(group, group.random(generator), role)
            torch.testing.assert_close(g @ turn, turn @ g)
        assert (generic @ turn - turn @ generic).abs().max() > 0.1
        if rotary > 2:
            misplaced = RopeCommutant(size, rotary, other)
            wrong = matrix(misplaced, misplaced.random(generator), "vector")
            assert (wrong @ turn - turn @ wrong).abs().max() > 0.1


def test_a_layernorm_survives_rotations_that_keep_the_mean():
    group = Orthogonal(6, keeps_mean=True)
    generator = seeded(0)
    x = normal(generator, 6, 10)
    norms = partial(torch.nn.functional.layer_norm, normalized_shape=(6,))
    for g in (group.random(generator), group.match({"vector": normal(generator, 6, 6)})):
        torch.testing.assert_close(g @ torch.ones(6, dtype=g.dtype), torch.ones(6, dtype=g.dtype))
        torch.testing.assert_close(norms((g @ x).T), norms(x.T) @ g.T)


@pytest.mark.parametrize("group", [GeneralLinear(4), RopeCommutant(6, 2)], ids=repr)
@pytest.mark.parametrize("missing", ["vector", "dual", "both", "a direction"])
def test_balancing_what_is_rank_deficient_stays_bounded(group, missing):
    generator = seeded(4)
    n = group.size("vector")
    rows = {"vector": normal(generator, n, 9), "dual": normal(generator, n, 9)}
    if missing in rows:
        rows[missing] = torch.zeros(n, 9, dtype=torch.float64)
    elif missing == "both":
        rows = {role: torch.zeros(n, 9, dtype=torch.float64) for role in rows}
    else:
        rows["vector"] = rows["vector"][:, :1].expand(n, 9)
    g = group.balance(squares_of(group, rows))
    for role, x in rows.items():
        moved = group.act(g, x, role)
        assert torch.isfinite(moved).all()
        assert moved.norm() <= 100 * x.norm()
    assert norm({role: group.act(g, x, role) for role, x in rows.items()}) <= norm(rows)


def test_odd_planes_and_unknown_layouts_are_refused():
    with pytest.raises(SymmetryError, match="no planes"):
        RopeCommutant(5)
    with pytest.raises(SymmetryError, match="layout 'quarter'"):
        PlaneSigns(4, layout="quarter")
    with pytest.raises(SymmetryError, match="cannot turn 6 of 4"):
        RopeCommutant(4, 6)
