"""GeoMerge on adapters' updates: gauge, order, ranks, absent updates, refusals."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from isthmus.errors import MethodError
from isthmus.geometry import low_rank
from isthmus.geometry.factored import Factored
from isthmus.geometry.fixed_rank import FixedRank, Polar
from isthmus.geometry.lbfgs import Memory
from isthmus.geometry.quotient import Quotient
from isthmus.methods.adapters import merge_updates, merge_vectors
from isthmus.methods.geomerge import (
    CUT,
    GEOMERGE,
    LEFT_OUT,
    LOWER,
    NO_GEODESIC,
    RAISED,
    UNCERTIFIED,
    UNSETTLED,
    WEAK,
)
from isthmus.methods.method import Settings

DISTANCES = ["canonical", "grassmann", "projection"]
LOSSES = [("squared", None), ("huber", 1.0), ("median", None)]


def updates(ranks, *, trunk=3.0, m=40, n=30, seed=0):
    """Factors with Gaussian entries around a common trunk that many times larger."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    left, right = normal(m, max(ranks)), normal(max(ranks), n)
    return [
        Factored(
            (trunk * left[:, :r] + normal(m, r)) * torch.logspace(0, -0.5, r).double(),
            trunk * right[:r] + normal(r, n),
        )
        for r in ranks
    ]


def settings(*weights, **shared):
    names = {"distance": "canonical", "loss": "squared", "delta": None, "lambda": 1.0}
    return Settings(names | shared, {"weight": weights})


def merge(given, *weights, rank=4, **shared):
    chosen = settings(*(weights or [1.0] * len(given)), **shared)
    return merge_updates(GEOMERGE, given, chosen, space=None, rank=rank)


def regauged(update, seed, condition=1e6):
    """The same product by factors of that condition number."""
    generator = torch.Generator().manual_seed(seed)
    r = update.rank
    turns = torch.linalg.qr(torch.randn(2, r, r, generator=generator, dtype=torch.float64)).Q
    sizes = torch.logspace(0.5, -0.5, r, dtype=torch.float64) ** np.log10(condition)
    return Factored(
        update.left @ (turns[0] * sizes) @ turns[1],
        turns[1].mT @ (turns[0] / sizes).mT @ update.right,
    )


def gap(merged, expected):
    expected = expected if isinstance(expected, torch.Tensor) else expected.update.matrix()
    return float((merged.update.matrix() - expected).norm() / expected.norm())


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("ranks", [(4, 4, 4), (2, 4, 3)])
def test_factorisations_do_not_matter(distance, ranks):
    given = updates(ranks)
    bad = [regauged(update, k) for k, update in enumerate(given)]
    plain = merge(given, 1.0, 2.0, 3.0, distance=distance)
    assert gap(merge(bad, 1.0, 2.0, 3.0, distance=distance), plain) < 1e-8


def test_the_average_of_factors_depends_on_them():
    given = updates([4, 4, 4])
    bad = [regauged(update, k) for k, update in enumerate(given)]
    one, two = (sum(x.left for x in g) @ sum(x.right for x in g) / 9 for g in (given, bad))
    assert float((one - two).norm()) > 0.5 * float(one.norm())


def test_factorisations_do_not_matter_for_unrelated_adapters_in_single_precision():
    given = updates([8] * 4, trunk=0.0, m=128, n=128)
    bad = [
        Factored(*(factor.float().double() for factor in regauged(update, k, condition=10)))
        for k, update in enumerate(given)
    ]
    plain, other = merge(given, rank=8), merge(bad, rank=8)
    assert plain.notes == other.notes == (UNCERTIFIED,)
    assert gap(other, plain) < 1e-5


@pytest.mark.parametrize(("loss", "delta"), LOSSES)
@pytest.mark.parametrize("ranks", [(4, 4, 4), (2, 4, 3)])
def test_order_does_not_matter(loss, delta, ranks):
    given = updates(ranks)
    one = merge(given, 1.0, 2.0, 3.0, loss=loss, delta=delta)
    two = merge([given[k] for k in (2, 0, 1)], 3.0, 1.0, 2.0, loss=loss, delta=delta)
    assert gap(two, one) < 1e-8


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("rank", [4, 7])
def test_one_adapter_comes_back(distance, rank):
    (update,) = updates([4])
    merged = merge([update], rank=rank, distance=distance)
    assert gap(merged, update.matrix()) < 1e-13
    assert merged.update.rank == rank
    assert merged.kept == pytest.approx(1.0)
    assert merged.notes == ()


@pytest.mark.parametrize(
    ("distance", "loss", "delta"),
    # Other losses of other distances are refused, below.
    [(d, *loss) for d in DISTANCES for loss in LOSSES if d == "canonical" or loss[0] == "squared"],
)
def test_equal_adapters_are_their_own_mean(distance, loss, delta):
    (update,) = updates([4])
    given = [update, regauged(update, 1), regauged(update, 2)]
    merged = merge(given, 1.0, 2.0, 3.0, distance=distance, loss=loss, delta=delta)
    assert gap(merged, update.matrix()) < 1e-9
    assert merged.notes == ()


def test_two_adapters_merge_into_the_middle_of_their_geodesic():
    given = updates([4, 4])
    x, y = (Polar.of_pair(*update) for update in given)
    quotient = Quotient(FixedRank(40, 30, 4))
    for weights, time in [((1.0, 1.0), 0.5), ((3.0, 1.0), 0.25)]:
        middle = quotient.exp(x, quotient.scale(time, quotient.log(x, y)))
        assert gap(merge(given, *weights), middle.matrix()) < 1e-9


def test_only_ratios_of_weights_count_and_lambda_scales():
    given = updates([4, 4, 4])
    plain = merge(given, 1.0, 2.0, 3.0)
    assert gap(merge(given, 10.0, 20.0, 30.0), plain) < 1e-10
    scaled = merge(given, 1.0, 2.0, 3.0, **{"lambda": -0.5})
    assert gap(scaled, -0.5 * plain.update.matrix()) < 1e-12


def test_common_scale_goes_through_and_strengths_average_geometrically():
    given = updates([4, 4, 4])
    plain = merge(given)
    assert (
        gap(merge([update.scaled(100.0) for update in given]), 100 * plain.update.matrix()) < 1e-9
    )
    (update,) = updates([4])
    assert gap(merge([update, update.scaled(9.0)]), 3 * update.matrix()) < 1e-10


def test_absent_adapters_and_those_of_weight_zero_take_no_part():
    given = updates([4, 4, 4])
    zero = Factored.zero(40, 30)
    without = merge(given[:2], 1.0, 2.0)
    absent = merge([given[0], zero, given[1]], 1.0, 5.0, 2.0)
    assert gap(absent, without) < 1e-10
    assert absent.notes == (LEFT_OUT,)
    unweighted = merge(given, 1.0, 2.0, 0.0)
    assert gap(unweighted, without) < 1e-10
    assert unweighted.notes == ()


@pytest.mark.parametrize("factor", [1e-10, 1e-13, 1e-200])
def test_a_weak_adapter_is_not_called_absent(factor):
    given = updates([4, 4])
    weak = given[1].scaled(factor)
    merged = merge([given[0], weak])
    assert gap(merged, given[0].matrix()) < 1e-9
    assert merged.notes == (WEAK,)
    assert merge([given[0], weak, Factored.zero(40, 30)]).notes == (LEFT_OUT, WEAK)


@pytest.mark.parametrize(("loss", "delta"), LOSSES)
@pytest.mark.parametrize("size", [1e30, 1e300])
def test_steps_so_long_that_numbers_overflow_are_halved(size, loss, delta, monkeypatch):
    """As where the curvature along the last step nearly vanishes."""
    given = updates([4, 4, 4], trunk=1.0)
    plain = merge(given, loss=loss, delta=delta)
    direction = Memory.direction
    calls = []

    def long(memory, gradient, inverse):
        calls.append(size if len(calls) == 2 else 1.0)
        return direction(memory, gradient, inverse) * calls[-1]

    monkeypatch.setattr(Memory, "direction", long)
    merged = merge(given, loss=loss, delta=delta)
    assert size in calls
    assert merged.notes == plain.notes
    assert gap(merged, plain) < 1e-6


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("power", [-950, -400, 200])
def test_the_strength_of_factors_does_not_matter(distance, power):
    given = updates([4, 3, 4])
    strong = [Factored(*(factor * 2.0**power for factor in update)) for update in given]
    plain, merged = merge(given, distance=distance), merge(strong, distance=distance)
    assert merged.notes == plain.notes
    back = Factored(*(factor * 2.0**-power for factor in merged.update))
    assert float((back.matrix() - plain.update.matrix()).norm()) < 1e-9 * float(
        plain.update.matrix().norm()
    )


def test_nothing_changed_gives_nothing():
    zero = Factored.zero(6, 5)
    padded = Factored(torch.zeros(6, 2), torch.randn(2, 5))
    merged = merge([zero, padded], rank=3)
    assert merged.update.left.shape == (6, 3)
    assert not merged.update.matrix().any()
    assert merged.notes == (LEFT_OUT,)


def test_ranks_that_differ_are_noted():
    assert merge(updates([4, 4, 4])).notes == ()
    assert merge(updates([2, 4, 4])).notes == (RAISED,)
    assert merge(updates([6, 4, 4])).notes == (CUT,)
    assert RAISED in merge(updates([4, 4, 4]), rank=8).notes
    alike = [update.scaled(f) for f in (1.0, 2.0) for update in updates([4])]
    merged = merge(alike, rank=6)
    assert LOWER in merged.notes
    assert merged.update.rank == 6
    assert torch.linalg.matrix_rank(merged.update.matrix()) == 4


def test_numerically_deficient_adapters_count_at_their_true_rank():
    given = updates([4, 4, 4])
    left = given[0].left.clone()
    left[:, 3] = left[:, 2] + 1e-11 * left[:, 3]
    right = given[0].right.clone()
    exact = Factored(left[:, :3], torch.cat([right[:2], right[2:3] + right[3:]]))
    deficient = merge([Factored(left, right), *given[1:]])
    assert deficient.notes == (RAISED,)
    assert gap(deficient, merge([exact, *given[1:]])) < 1e-8


def test_a_rank_beyond_the_matrix():
    merged = merge(updates([4, 4], m=6, n=5), rank=9)
    assert merged.update.left.shape == (6, 9)
    assert torch.linalg.matrix_rank(merged.update.matrix()) <= 5
    assert LOWER in merged.notes


def test_it_says_how_sure_it_is(monkeypatch):
    unrelated = updates([8] * 4, trunk=0.0, m=128, n=128)
    assert merge(unrelated, rank=8).notes == (UNCERTIFIED,)
    hurried = partial(low_rank.quotient_mean, max_evaluations=20)
    monkeypatch.setattr(low_rank, "quotient_mean", hurried)
    assert merge(unrelated, rank=8).notes == (UNSETTLED,)


def test_matrices_of_opposite_determinants_have_no_geodesic():
    plus = Factored(torch.diag(torch.tensor([1.0, 2.0, 3.0])).double(), torch.eye(3).double())
    minus = Factored(torch.diag(torch.tensor([1.0, 2.0, -3.0])).double(), torch.eye(3).double())
    opposed = merge([plus, minus], rank=3)
    assert opposed.notes == (NO_GEODESIC,)
    assert torch.isfinite(opposed.update.matrix()).all()


def test_an_adapter_and_its_opposite_do_not_cancel():
    """−ΔW is ΔW with U turned by half a turn; in even rank there is a way, and there are several."""
    (update,) = updates([4])
    merged = merge([update, update.scaled(-1.0)])
    assert torch.isfinite(merged.update.matrix()).all()
    strengths = torch.linalg.svdvals(merged.update.matrix())[:4]
    assert float(strengths.min()) > 0.1 * float(torch.linalg.svdvals(update.matrix())[3])


def test_what_adapters_store_in_full_is_averaged():
    vectors = [torch.tensor([1.0, 2.0]), torch.zeros(2), torch.tensor([3.0, 6.0])]
    merged = merge_vectors(GEOMERGE, vectors, settings(1.0, 1.0, 2.0, **{"lambda": 2.0}))
    torch.testing.assert_close(merged, torch.tensor([3.5, 7.0], dtype=torch.float64))


def test_absent_adapters_take_no_part_in_the_mean_of_biases():
    vectors = [torch.tensor([1.0, 2.0]), None, torch.tensor([4.0, 8.0])]
    merged = merge_vectors(GEOMERGE, vectors, settings(1.0, 5.0, 2.0))
    torch.testing.assert_close(merged, torch.tensor([3.0, 6.0], dtype=torch.float64))
    unweighted = merge_vectors(GEOMERGE, vectors, settings(0.0, 5.0, 0.0))
    torch.testing.assert_close(unweighted, torch.zeros(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("shared", "weights", "problem", "cure"),
    [
        ({}, (0.0, 0.0), "all weights are zero", "positive weight"),
        ({"loss": "huber"}, (1.0, 1.0), "delta: none", "Give delta"),
        ({"delta": 1.0}, (1.0, 1.0), "delta: 1.0", "no other loss"),
        ({"loss": "median", "distance": "projection"}, (1.0, 1.0), "squared loss", "canonical"),
    ],
)
def test_refusals(shared, weights, problem, cure):
    with pytest.raises(MethodError) as refusal:
        merge(updates([4, 4]), *weights, **shared)
    assert problem in refusal.value.problem
    assert cure in refusal.value.cure


def test_bad_updates_are_refused():
    given = updates([4, 4])
    with pytest.raises(MethodError, match="NaN"):
        merge([given[0], given[1].scaled(float("nan"))])
    with pytest.raises(MethodError, match="rank 0"):
        merge(given, rank=0)


def test_parameters_refuse_negative_weights():
    weight = next(p for p in GEOMERGE.parameters if p.name == "weight")
    with pytest.raises(MethodError, match="must be in"):
        weight.validate(-1)
