from __future__ import annotations

from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.lab.tuning import Trial, tune


def peak_at(scale):
    return lambda trial: -abs(log2(trial.scale) - log2(scale))


@given(st.floats(-2, 2), st.integers(5, 12))
def test_the_climb_finds_a_single_peak(exponent, tries):
    found = tune(peak_at(2.0**exponent), tries=tries)
    assert len(found.scores) == tries
    assert abs(log2(found.best.scale) - exponent) <= 0.5
    assert not found.at_edge


@given(st.integers(3, 12), st.sampled_from([(), (0.5,), (0.5, 0.2, 0.8)]))
def test_everybody_has_the_same_number_of_tries(tries, densities):
    calls = []

    def score(trial):
        calls.append(trial)
        return trial.scale

    found = tune(score, tries=tries, densities=densities)
    assert len(calls) == tries == len(set(calls))
    assert [*found.scores] == calls


def test_what_is_best_is_the_maximum_and_the_first_of_equals():
    found = tune(lambda _: 1.0, tries=6)
    assert found.best == Trial(1.0)
    found = tune(lambda trial: -(((trial.density or 0) - 0.2) ** 2), tries=6, densities=(0.5, 0.2))
    assert found.best.density == 0.2


@pytest.mark.parametrize("sign", [1, -1])
def test_a_climb_without_end_says_so(sign):
    found = tune(lambda trial: sign * trial.scale, tries=6)
    assert found.at_edge
    assert abs(log2(found.best.scale)) >= 4


def test_a_trial_reads_as_people_write():
    assert str(Trial(2**-0.5, 0.2)) == "λ=0.707, density 0.2"
    assert str(Trial(4.0)) == "λ=4"
