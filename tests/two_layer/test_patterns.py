"""Patterns against Cover's formula, random neurons, and counts known by hand."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus.errors import TwoLayerError
from isthmus.two_layer.patterns import Patterns, chambers, cover_count, patterns


@pytest.mark.parametrize(
    ("n", "d"), [(1, 1), (3, 1), (1, 2), (5, 2), (4, 3), (6, 3), (5, 4), (3, 5)]
)
def test_general_position_has_covers_count(n, d):
    points = np.random.default_rng(10 * n + d).normal(size=(n, d))
    found = patterns(points)
    distinct = 1 if d == 1 else n
    assert found.count == cover_count(distinct, d) == chambers(points)
    assert found.verify()


@pytest.mark.parametrize("d", [2, 3])
def test_no_random_neuron_has_another_pattern(d):
    random = np.random.default_rng(d)
    points = random.normal(size=(5, d))
    known = {tuple(row) for row in patterns(points).active}
    seen = {tuple(row) for row in random.normal(size=(20000, d)) @ points.T > 0}
    assert seen == known


def test_special_positions():
    # Braid arrangement of three coordinates: 3! chambers. Antipodes, copies and zeros cut nothing.
    braid = np.array([[1, -1, 0], [0, 1, -1], [1, 0, -1]])
    assert chambers(braid) == 6
    more = np.concatenate([braid, -braid, 2 * braid, np.zeros((1, 3))])
    found = patterns(more)
    assert found.count == 6
    assert found.verify()
    assert not found.active[:, -1].any()
    cube = patterns(np.eye(4))
    assert cube.count == 16
    assert cube.seen == 15


def test_a_missing_or_wrong_pattern_does_not_verify():
    found = patterns(np.random.default_rng(0).normal(size=(4, 3)))
    assert not Patterns(found.points, found.active[1:], found.interiors[1:]).verify()
    assert not Patterns(found.points, ~found.active, found.interiors).verify()
    twice = np.concatenate([found.active[1:], found.active[1:2]])
    inside = np.concatenate([found.interiors[1:], found.interiors[1:2]])
    assert not Patterns(found.points, twice, inside).verify()


@pytest.mark.parametrize("points", [np.zeros(3), np.zeros((0, 2)), [[1.0, np.nan]]])
def test_bad_points(points):
    with pytest.raises(TwoLayerError, match="points"):
        patterns(points)
