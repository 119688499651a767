"""Barriers by hand, and profiles of losses known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest

from isthmus.errors import PathError
from isthmus.paths.barriers import barrier
from isthmus.paths.curves import Linear, PolygonalChain
from isthmus.paths.path import Path, grid
from isthmus.paths.profile import profile

from .points import flat, model

TS = [0.0, 0.25, 0.5, 0.75, 1.0]


def test_both_kinds_by_hand():
    losses = [1.0, 2.5, 2.0, 3.0, 3.0]
    # (a) from 2: -1, 0.5, 0, 1, 1. (b) from 1, 1.5, 2, 2.5, 3: 0, 1, 0, 0.5, 0.
    a, b = barrier(losses, TS, "a"), barrier(losses, TS, "b")
    assert (a.value, a.at) == (1.0, 0.75)
    assert (b.value, b.at) == (1.0, 0.25)
    assert a.excess == (-1, 0.5, 0, 1, 1)
    assert b.excess == (0, 1, 0, 0.5, 0)
    assert b.ts == tuple(TS)
    assert barrier(losses, TS) == b


def test_a_path_below_its_ends():
    low = barrier([2.0, 1.0, 1.5, 1.75, 3.0], TS)
    assert low.value == 0
    assert low.interior == -1.0
    assert low.lowest == -1.25


def test_they_agree_where_the_ends_do():
    losses = np.random.default_rng(0).random(5)
    losses[-1] = losses[0]
    assert barrier(list(losses), TS, "a").value == pytest.approx(barrier(list(losses), TS).value)


def test_the_profile_of_a_quadratic_has_its_closed_form():
    a, b = model(0), model(1)
    x, y = flat(a), flat(b)
    told = []
    found = profile(
        Path(Linear(), (a, b)),
        lambda point: {"loss": float(flat(point).square().sum()), "first": float(flat(point)[0])},
        grid(9),
        progress=lambda done, total: told.append((done, total)),
    )
    # ‖(1−t)x + ty‖² lies t(1−t)‖x − y‖² below its chord.
    gap = float((x - y).square().sum())
    for t, loss in zip(found.ts, found.values["loss"], strict=True):
        chord = (1 - t) * float(x.square().sum()) + t * float(y.square().sum())
        assert loss == pytest.approx(chord - t * (1 - t) * gap, rel=1e-12)
    low = found.barrier()
    assert low.value == 0
    assert low.lowest == pytest.approx(-gap / 4, rel=1e-12)
    assert told == [(k, 9) for k in range(1, 10)]
    first = found.values["first"]
    np.testing.assert_allclose(first, np.interp(found.ts, [0, 1], [first[0], first[-1]]))
    assert found.barrier(name="first").value == pytest.approx(0, abs=1e-12)


def test_a_straight_chain_has_the_loss_of_the_line():
    a, b = model(0), model(1)

    def evaluate(point):
        return {"loss": float(flat(point).sin().sum())}

    line = profile(Path(Linear(), (a, b)), evaluate, grid(9))
    chain = profile(Path.straight(PolygonalChain(3), a, b), evaluate, grid(9))
    np.testing.assert_allclose(chain.values["loss"], line.values["loss"], rtol=1e-12)


def test_models_are_prepared_at_every_t_ends_included():
    seen = []

    def prepare(t, point):
        seen.append(t)
        return {**point, "b": point["b"] * 0 + t}

    found = profile(
        Path(Linear(), (model(0), model(1))),
        lambda point: {"loss": float(point["b"].sum())},
        grid(5),
        prepare=prepare,
    )
    assert seen == TS
    assert found.values["loss"] == pytest.approx([4 * t for t in TS])


def test_figures_that_are_not_finite_are_refused_with_t():
    def evaluate(point):
        return {"loss": float("nan") if float(flat(point)[0]) > 10 else 0.0}

    b = model(1)
    b["w"] = b["w"] + 40
    with pytest.raises(PathError, match=r"The loss at t = 0\.5 is nan"):
        profile(Path(Linear(), (model(0), b)), evaluate, [0, 0.5, 1])


def test_a_profile_needs_its_ends():
    with pytest.raises(PathError, match="begins with t = 0"):
        profile(Path(Linear(), (model(0), model(1))), lambda _: {"loss": 0.0}, [0.0, 0.5])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_barriers_refuse_what_is_not_finite(bad):
    with pytest.raises(PathError, match=r"t = 0\.5 is"):
        barrier([0, 0, bad, 0, 0], TS)


def test_barriers_refuse_grids_that_show_none():
    with pytest.raises(PathError, match="between the ends"):
        barrier([0.0, 1.0], [0.0, 1.0])
    with pytest.raises(PathError, match="at every t"):
        barrier([0.0, 1.0], TS)
    with pytest.raises(PathError, match="kind 'c'"):
        barrier([0.0] * 5, TS, "c")
    found = profile(Path(Linear(), (model(0), model(1))), lambda _: {"loss": 0.0}, TS)
    with pytest.raises(PathError, match="no figure 'accuracy'"):
        found.barrier(name="accuracy")
