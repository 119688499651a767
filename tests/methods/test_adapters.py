"""What holds for the merge of adapters, for every method in every space."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isthmus.errors import MethodError
from isthmus.geometry.factored import Factored
from isthmus.methods.adapters import CHUNK, add_scaled, merge_updates, merge_vectors
from isthmus.methods.registry import METHODS

from .streams import run
from .streams import settings as make_settings

# The quotient space has a test file of its own.
PAIRS = [(m.name, s) for m in METHODS.values() for s in m.spaces if s != "quotient"]
SEVERAL = [(name, space) for name, space in PAIRS if METHODS[name].max_experts is None]
FLATTENING = {"iso_c", "iso_cts"}
M, N = 24, 20
RANKS = (3, 5, 2)

pairs = pytest.mark.parametrize(("name", "space"), PAIRS)
several = pytest.mark.parametrize(("name", "space"), SEVERAL)


@pytest.fixture
def draw():
    return torch.Generator().manual_seed(8)


def random(draw, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


@pytest.fixture
def updates(draw) -> list[Factored]:
    return [Factored(random(draw, M, r), random(draw, r, N)) for r in RANKS]


def regauged(update: Factored, draw, condition: float) -> Factored:
    """(BQ, Q⁻¹A), Q of a given condition."""
    rank = update.rank
    u, _, v = torch.linalg.svd(random(draw, rank, rank))
    scales = torch.logspace(0, -np.log10(condition), rank, dtype=torch.float64)
    return Factored(update.left @ (u * scales) @ v, v.mT @ (u / scales).mT @ update.right)


def possible(name: str, rank: int) -> int:
    """The asked rank, or that of all updates for a method which cuts nothing."""
    return rank if METHODS[name].compresses else max(rank, sum(RANKS))


def chosen(name: str, count: int, density: float = 0.3, seeds: tuple[int, ...] = (), **values):
    method = METHODS[name]
    known = {"weight": 1.0, "density": density} | values
    names = {parameter.name for parameter in method.parameters}
    return make_settings(
        method, count, seeds, **{key: value for key, value in known.items() if key in names}
    )


def merge(name, space, updates, rank=None, **values):
    rank = rank or max(1, sum(update.rank for update in updates))
    return merge_updates(
        METHODS[name], updates, chosen(name, len(updates), **values), space=space, rank=rank
    )


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def best(matrix: torch.Tensor, rank: int) -> torch.Tensor:
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


def dense(name: str, updates, **values) -> torch.Tensor:
    """The same method on the updates as full weights over a base of zeros."""
    experts = np.stack([update.matrix().numpy() for update in updates])
    method = METHODS[name]
    names = {parameter.name for parameter in method.parameters}
    known = {"weight": 1.0, "density": 0.3} | values
    values = {key: value for key, value in known.items() if key in names}
    return torch.from_numpy(run(method, experts, np.zeros((M, N)), **values))


@pytest.mark.parametrize("shape", [(3, M, 1), (3, 1, N), (3, 1, 1)])
def test_scaled_updates_add_up(shape, updates, draw):
    scales = random(draw, *shape)
    merged = add_scaled(updates, scales, rank=sum(RANKS))
    expected = sum(d * u.matrix() for d, u in zip(scales, updates, strict=True))
    assert error(merged.update.matrix(), expected) < 1e-12
    assert merged.kept == pytest.approx(1)
    least = add_scaled(updates, scales, rank=2)
    assert error(least.update.matrix(), best(expected, 2)) < 1e-12


@pairs
@pytest.mark.parametrize("rank", RANKS)
def test_one_update_at_weight_one_comes_back(name, space, rank, draw):
    """Iso replaces the singular values by their mean: there an update whose are equal comes back."""
    update = Factored(random(draw, M, rank), random(draw, rank, N))
    if name in FLATTENING:
        left, right = torch.linalg.qr(update.left).Q, torch.linalg.qr(update.right.mT).Q
        update = Factored(0.3 * left, right.mT)
    merged = merge(name, space, [update], density=1.0)
    assert error(merged.update.matrix(), update.matrix()) < 1e-12
    assert merged.kept == pytest.approx(1)


@several
def test_one_update_beside_adapters_that_leave_the_module_alone(name, space, updates):
    zero = Factored.zero(M, N)
    alone = merge(name, space, updates[:1], rank=6, density=1.0)
    beside = merge(name, space, [zero, updates[0], zero], rank=6, density=1.0)
    averaging = name == "linear" or METHODS[name].calibrated
    factor = 1 / 3 if averaging else 1  # an average counts them
    assert error(beside.update.matrix(), factor * alone.update.matrix()) < 1e-12


@several
@pytest.mark.parametrize("rank", [4, 10])
def test_the_order_of_the_adapters_does_not_matter(name, space, rank, updates):
    rank = possible(name, rank)
    weights, seeds, order = (0.2, 0.5, 0.9), (11, 12, 13), [2, 0, 1]
    one = merge(name, space, updates, rank, weight=weights, seeds=seeds)
    other = merge(
        name,
        space,
        [updates[i] for i in order],
        rank,
        weight=tuple(weights[i] for i in order),
        seeds=tuple(seeds[i] for i in order),
    )
    assert error(other.update.matrix(), one.update.matrix()) < 1e-9


@pairs
@pytest.mark.parametrize("rank", [4, 10])
@pytest.mark.parametrize("condition", [1.0, 1e3, 1e6])
def test_the_factorisation_does_not_matter(name, space, rank, condition, updates, draw):
    rank = possible(name, rank)
    updates = updates[: METHODS[name].max_experts]
    one = merge(name, space, updates, rank)
    other = merge(name, space, [regauged(u, draw, condition) for u in updates], rank)
    assert error(other.update.matrix(), one.update.matrix()) < 1e-7
    assert other.kept == pytest.approx(one.kept, abs=1e-7)


def test_the_average_of_the_factors_depends_on_the_factorisation(updates, draw):
    """What the spaces are for: the rule that they replace."""

    def average(pair):
        return (sum(u.left for u in pair) / 2) @ (sum(u.right for u in pair) / 2)

    pair = [updates[1], Factored(random(draw, M, 5), random(draw, 5, N))]
    same = [pair[0], regauged(pair[1], draw, 10)]
    assert error(average(same), average(pair)) > 0.3
    exact = sum(u.matrix() for u in pair) / 2
    assert error(average(pair), exact) > 0.3
    assert error(merge("linear", None, same, 10).update.matrix(), exact) < 1e-12


@pairs
def test_the_result_has_the_rank_and_is_balanced(name, space, updates):
    updates = updates[: METHODS[name].max_experts]
    merged = merge(name, space, updates, 12)
    left, right = merged.update
    assert (left.shape, right.shape) == ((M, 12), (12, N))
    assert left.dtype == right.dtype == torch.float64
    assert 0 < merged.kept <= 1
    if name != "cat":  # its factors are the adapters'
        torch.testing.assert_close(left.mT @ left, right @ right.mT, rtol=1e-9, atol=1e-9)


@several
def test_updates_that_are_all_zero_give_zero(name, space):
    for zero in (Factored.zero(M, N), Factored(torch.zeros(M, 2), torch.ones(2, N))):
        merged = merge(name, space, [zero] * 3, rank=6)
        assert merged.kept == 1
        assert merged.update.left.shape == (M, 6)
        assert not merged.update.matrix().any()


# TIES elects the plus sign where the sum is zero.
@pytest.mark.parametrize(
    ("name", "space"), [pair for pair in SEVERAL if pair[0] not in {"ties", "dare_ties"}]
)
def test_updates_that_cancel_give_next_to_zero(name, space, updates):
    pair = [updates[0], updates[0].scaled(-1)]
    merged = merge(name, space, pair, rank=6, density=1.0, normalize=False).update.matrix()
    assert torch.isfinite(merged).all()
    if name != "tsv":  # takes the two for tasks with directions of their own
        assert merged.norm() < 1e-12 * updates[0].matrix().norm()


@several
def test_dependent_factors_count_as_the_rank_they_have(name, space, updates, draw):
    """Columns twice, and noise of rounding size, are no directions; what is flattened would show it."""
    wide = [
        Factored(
            torch.cat([u.left, u.left], dim=1) / 2 + 1e-14 * random(draw, M, 2 * u.rank),
            torch.cat([u.right, u.right]),
        )
        for u in updates
    ]
    one = merge(name, space, updates, 20)
    other = merge(name, space, wide, 20)
    assert error(other.update.matrix(), one.update.matrix()) < 1e-9


@several
def test_ranks_beyond_the_matrix(name, space, draw):
    updates = [Factored(random(draw, 7, 9), random(draw, 9, 5)) for _ in range(2)]
    merged = merge(name, space, updates, 18)
    assert merged.update.left.shape == (7, 18)
    assert merged.kept == pytest.approx(1)
    assert torch.isfinite(merged.update.matrix()).all()


@pytest.mark.parametrize("space", METHODS["linear"].spaces)
@pytest.mark.parametrize("rank", [1, 4, 10, 20])
def test_linear_is_the_best_approximation_of_the_sum(space, rank, updates):
    weights = (0.7, -0.2, 1.1)
    total = sum(w * u.matrix() for w, u in zip(weights, updates, strict=True)) / sum(weights)
    merged = merge("linear", space, updates, rank, weight=weights)
    expected = best(total, rank)
    assert error(merged.update.matrix(), expected) < 1e-10
    assert merged.kept == pytest.approx(float(expected.norm() / total.norm()) ** 2, abs=1e-12)


@pytest.mark.parametrize("name", [name for name, space in SEVERAL if space == "full"])
@pytest.mark.parametrize("density", [1.0, 0.3])
def test_full_is_the_merge_of_the_full_weights(name, density, updates, monkeypatch):
    monkeypatch.setattr("isthmus.methods.adapters.CHUNK", 3 * N)  # several chunks
    weights = (0.7, 0.4, 1.1)
    expected = dense(name, updates, weight=weights, density=density)
    whole = merge(name, "full", updates, M, weight=weights, density=density)
    assert error(whole.update.matrix(), expected) < 1e-12
    cut = merge(name, "full", updates, 4, weight=weights, density=density)
    assert error(cut.update.matrix(), best(expected, 4)) < 1e-10


@pytest.mark.parametrize(
    "name", [name for name, space in SEVERAL if "full" not in METHODS[name].spaces]
)
def test_the_core_is_the_merge_of_the_full_weights(name, updates):
    weights = (0.7, 0.4, 1.1)
    merged = merge(name, "core", updates, weight=weights)
    assert error(merged.update.matrix(), dense(name, updates, weight=weights)) < 1e-8


@pytest.mark.parametrize("name", ["ties", "magnitude", "dare_linear", "dare_ties"])
def test_core_and_knots_are_the_rule_on_coordinates(name, updates):
    """Rebuilt with dense decompositions, signs as they come: the rules do not see signs."""
    matrices = [u.matrix() for u in updates]
    left = torch.linalg.svd(torch.cat(matrices, 1), full_matrices=False).U[:, : sum(RANKS)]
    right = torch.linalg.svd(torch.cat(matrices), full_matrices=False).Vh[: sum(RANKS)].mT
    for space, coordinates, back in [
        ("core", [left.mT @ x @ right for x in matrices], right.mT),
        ("knots", [left.mT @ x for x in matrices], torch.eye(N).double()),
    ]:
        stack = torch.stack(coordinates).numpy()
        values = {"weight": 1.0, "density": 0.3}
        merged = run(METHODS[name], stack, np.zeros(stack.shape[1:]), **values)
        expected = left @ torch.from_numpy(merged) @ back
        assert error(merge(name, space, updates).update.matrix(), expected) < 1e-9


def test_cat_is_the_exact_sum_and_takes_no_less_room(updates):
    weights = (0.7, -0.2, 1.1)
    total = sum(w * u.matrix() for w, u in zip(weights, updates, strict=True))
    merged = merge("cat", None, updates, sum(RANKS), weight=weights)
    assert error(merged.update.matrix(), total) < 1e-15
    assert merged.kept == 1
    with pytest.raises(MethodError, match="rank 9 has no room") as caught:
        merge("cat", None, updates, 9)
    assert "task_arithmetic" in str(caught.value)


@pytest.mark.parametrize("factor", [1.0, -0.5])
@pytest.mark.parametrize("weight", [1.0, -1.0])
def test_a_flat_spectrum_that_is_cut_keeps_what_the_sum_has_most_of(factor, weight, updates):
    total = sum(u.matrix() for u in updates)
    u, s, v = torch.linalg.svd(total)
    length = factor * weight * s[: sum(RANKS)].mean()
    merged = merge("iso_c", None, updates, 4, weight=weight, **{"lambda": factor})
    assert error(merged.update.matrix(), length * u[:, :4] @ v[:4]) < 1e-9
    assert merged.kept == pytest.approx(0.4)


def test_the_default_is_the_first_space(updates):
    for name, spaces in [("ties", "full"), ("linear", "core"), ("tsv", "core")]:
        assert METHODS[name].spaces[0] == spaces
        one, other = merge(name, None, updates, 4), merge(name, spaces, updates, 4)
        torch.testing.assert_close(one.update.matrix(), other.update.matrix(), rtol=0, atol=0)


def test_factors_may_be_of_any_precision(updates):
    low = [Factored(u.left.bfloat16(), u.right.float()) for u in updates]
    exact = sum(u.left.double() @ u.right.double() for u in low) / 3
    assert error(merge("linear", None, low).update.matrix(), exact) < 1e-14


@several
@pytest.mark.parametrize("power", [-950, -400, 200])
def test_the_strength_of_the_factors_does_not_matter(name, space, power, updates):
    strong = [Factored(*(factor * 2.0**power for factor in u)) for u in updates]
    merged = merge(name, space, strong).update
    back = Factored(*(factor * 2.0**-power for factor in merged))
    assert error(back.matrix(), merge(name, space, updates).update.matrix()) < 1e-9


@pairs
@pytest.mark.parametrize(("factor", "power"), [(1e78, "15[67]"), (1e160, "32[01]")])
def test_updates_that_overflow_are_refused(name, space, factor, power, updates):
    updates = updates[: METHODS[name].max_experts]
    updates[-1] = Factored(*(part * factor for part in updates[-1]))
    problem = f"adapter {len(updates)} of {len(updates)} overflows: .* 1e{power}"
    with pytest.raises(MethodError, match=problem):
        merge(name, space, updates)


@pairs
def test_not_finite_factors_are_refused(name, space, updates):
    updates = updates[: METHODS[name].max_experts]
    for bad in (float("nan"), float("inf")):
        updates[-1].right[0, 0] = bad
        with pytest.raises(MethodError, match=f"adapter {len(updates)} of {len(updates)} .* NaN"):
            merge(name, space, updates)


def test_a_method_without_spaces_is_refused(updates):
    with pytest.raises(MethodError, match="slerp cannot merge adapters"):
        merge_updates(METHODS["slerp"], updates, chosen("slerp", 3, t=0.5), space=None, rank=2)


@pytest.mark.parametrize("space", ["quotient", "nowhere"])
def test_a_space_that_the_method_lacks_is_refused(space, updates):
    with pytest.raises(MethodError, match=f"ties .*'{space}'\n  Its spaces: full, core, knots"):
        merge("ties", space, updates)


def test_rank_zero_is_refused(updates):
    with pytest.raises(MethodError, match="rank 0"):
        merge_updates(METHODS["ties"], updates, chosen("ties", 3), space=None, rank=0)


def test_updates_of_different_shapes_are_refused(updates):
    with pytest.raises(MethodError, match="shapes"):
        merge("linear", None, [*updates, Factored.zero(N, M)])


def test_weights_that_sum_to_zero_are_refused(updates):
    with pytest.raises(MethodError, match="sum to zero"):
        merge("linear", None, updates, weight=(1.0, 1.0, -2.0))


@pytest.mark.parametrize("name", [name for name, _ in SEVERAL])
def test_vectors_are_merged_as_full_tensors_are(name, draw):
    vectors = [random(draw, 9), None, random(draw, 9).float()]
    merged = merge_vectors(METHODS[name], vectors, chosen(name, 3))
    rows = np.stack([np.zeros(9) if v is None else v.double().numpy() for v in vectors])
    values = {
        p.name: v
        for p in METHODS[name].parameters
        for key, v in [("weight", 1.0), ("density", 0.3)]
        if p.name == key
    }
    expected = run(METHODS[name], rows, np.zeros(9), **values)
    np.testing.assert_allclose(merged.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_vectors_of_different_lengths_are_refused(draw):
    with pytest.raises(MethodError, match="biases"):
        merge_vectors(METHODS["linear"], [random(draw, 3), random(draw, 4)], chosen("linear", 2))


def test_vectors_with_nan_are_refused():
    with pytest.raises(MethodError, match="NaN"):
        merge_vectors(METHODS["linear"], [torch.tensor([float("nan")])], chosen("linear", 1))


def test_a_large_update_is_formed_in_chunks_that_masks_can_start_at():
    from isthmus.methods.adapters import Products

    columns = 1001
    chunks = Products([Factored(torch.ones(1000, 1), torch.ones(1, columns)).double()])
    starts = [chunk.start for chunk in chunks]
    assert len(starts) > 2
    assert all(start % 8 == 0 for start in starts)
    assert starts[1] <= CHUNK
