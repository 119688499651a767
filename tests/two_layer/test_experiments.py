"""Trainings: limit points in their balls, pairs, and where two neurons end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from isthmus.errors import TwoLayerError
from isthmus.lab.two_layer import TwoLayerSettings, pairs_table, run_two_layer, training
from isthmus.two_layer.experiments import Training, connect_pairs, drawn, kinds, train, train_many
from isthmus.two_layer.network import Data, Network, norm
from isthmus.two_layer.split import components, two_neuron_data

from .solutions import random_data

NAMES = ("AdamW", "Signum", "Muon", "NGD")


@pytest.mark.parametrize("name", NAMES)
def test_limit_points_are_on_the_boundary_of_a_ball_too_small_and_the_best_in_it(name):
    # One neuron, one point: zero loss needs a·w = 1, a ball of R < 1 allows R², so that ½(1 − R²)² is left.
    data = Data.of([[1.0]], [1.0])
    method = training(name, 0.8, 1200)
    found = train(Network.of([0.3], [[0.4]]), data, method)
    assert found.saturation == pytest.approx(1, abs=5e-3)
    assert found.loss == pytest.approx(0.5 * (1 - 0.64) ** 2, rel=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_interpolation_inside_the_ball(name):
    data = random_data(0, 3, 2)
    method = training(name, 4.0, 1200)
    found = train(drawn(16, 2, seed=1), data, method)
    assert found.loss < 1e-6
    assert found.saturation <= 1 + 1e-3
    assert norm(found.network, method.ball) == pytest.approx(4 * found.saturation)


def test_pairs_of_wide_networks_are_connected():
    data = random_data(0, 3, 2)
    method = training("Muon", 4.0, 800)
    ends = train_many(24, data, method, range(3))
    pairs = connect_pairs(ends, data, method, tolerance=1e-4)
    assert (pairs.fitted, len(pairs.connections), pairs.fraction) == (3, 3, 1)
    assert all(one.bound.norm <= 4 * (1 + 1e-3) for one in pairs.connections)
    assert connect_pairs(ends, data, method, tolerance=0.0).fraction is None


def test_same_seed_same_bytes():
    data, method = random_data(0, 3, 2), training("Signum", 2.0, 50)
    one, other = (train(drawn(5, 2, seed=3), data, method) for _ in range(2))
    assert one.network.inner.tobytes() == other.network.inner.tobytes()


def test_kinds_of_known_ends():
    data = two_neuron_data()
    method = training("Muon", 1.6, 1)
    base = train(drawn(2, 2, seed=0), data, method)
    ends = [
        replace(base, seed=k, network=network)
        for k, network in enumerate(
            [*(one.network for one in components(data)), Network(np.ones(2), np.eye(2))]
        )
    ]
    assert kinds(ends, data) == {"same": (0, 1), "opposite": (2, 3), None: (4,)}


def test_adamw_and_muon_end_in_different_components():
    # From one start, inside windows where each ball holds one kind only.
    data = two_neuron_data()
    found = {}
    for name, radius in (("Signum", 1.04), ("Muon", 1.6)):
        ends = train_many(2, data, training(name, radius, 1500), range(6))
        found[name] = kinds(ends, data, 1e-5)
    assert found["Signum"]["same"]
    assert not found["Signum"]["opposite"]
    assert found["Muon"]["opposite"]
    assert not found["Muon"]["same"]


def test_the_command_writes_what_its_tables_show(tmp_path):
    settings = TwoLayerSettings(
        seeds=2,
        widths=(32,),
        points=3,
        split_seeds=1,
        steps=60,
        radii={"AdamW": 4.0},
        tolerance=0.4,
    )
    results = run_two_layer(tmp_path / "out", settings=settings)
    assert results["split"]["verified"]
    assert results["patterns verified"]
    assert results["split"]["barrier"] == "1/2"
    assert (tmp_path / "out/results.json").exists()
    (row,) = pairs_table(results).rows
    assert row[:2] == ("AdamW", "32")


def test_bad_trainings():
    data = random_data(0, 3, 2)
    good = training("Muon", 4.0, 1)
    with pytest.raises(TwoLayerError, match="learning rates"):
        train(drawn(2, 2, seed=0), data, replace(good, last_lr=1.0))
    with pytest.raises(TwoLayerError, match="several widths"):
        connect_pairs([], data, good)
    wild = Training(
        "wild", "max", 1.0, lambda p, lr: torch.optim.SGD(p, lr=1e9 * lr), lr=1e9, steps=60
    )
    with pytest.raises(TwoLayerError, match="diverged"):
        train(drawn(4, 2, seed=0), data, wild)
