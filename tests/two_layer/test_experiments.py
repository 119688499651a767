"""Trainings: limit points in their balls, pairs, and where two neurons end."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from isthmus.cli.main import app
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
    (found,) = train([Network.of([0.3], [[0.4]])], data, method)
    assert found.saturation == pytest.approx(1, abs=5e-3)
    assert found.loss == pytest.approx(0.5 * (1 - 0.64) ** 2, rel=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_interpolation_inside_the_ball(name):
    data = random_data(0, 3, 2)
    method = training(name, 4.0, 1200)
    (found,) = train([drawn(16, 2, seed=1)], data, method)
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
    (one,), (other,) = (train_many(5, data, method, [3]) for _ in range(2))
    assert one.network.inner.tobytes() == other.network.inner.tobytes()


def test_kinds_of_known_ends():
    data = two_neuron_data()
    method = training("Muon", 1.6, 1)
    (base,) = train_many(2, data, method, [0])
    ends = [
        replace(base, seed=k, network=network)
        for k, network in enumerate(
            [*(one.network for one in components(data)), Network(np.ones(2), np.eye(2))]
        )
    ]
    assert kinds(ends, data) == {"same": (0, 1), "opposite": (2, 3), None: (4,)}


def test_adamw_and_muon_end_in_different_components_from_the_same_starts():
    # λ = 1/1.08 and 1/1.65, inside the windows where each ball holds one kind only.
    data = two_neuron_data()
    found = {}
    for name, radius in (("AdamW", 1.08), ("Muon", 1.65)):
        ends = train_many(2, data, training(name, radius, 1500), range(10))
        found[name] = kinds(ends, data, 1e-5)
    assert found["AdamW"]["same"]
    assert not found["AdamW"]["opposite"]
    assert found["Muon"]["opposite"]
    assert not found["Muon"]["same"]


def test_side_by_side_is_one_by_one():
    data, method = random_data(0, 3, 2), training("Muon", 2.0, 100)
    together = train_many(5, data, method, [3, 4])
    alone = train_many(5, data, method, [4])
    np.testing.assert_allclose(together[1].network.inner, alone[0].network.inner, atol=1e-10)


def test_gradients_are_those_of_autograd():
    data, start = random_data(0, 4, 2), drawn(5, 2, seed=0)
    a, w = (torch.tensor(values, requires_grad=True) for values in (start.outer, start.inner))
    residual = torch.relu(torch.tensor(data.points) @ w.T) @ a - torch.tensor(data.labels)
    slopes = torch.autograd.grad(0.5 * residual.square().sum(), (a, w))
    plain = Training("SGD", "max", 1.0, lambda p, lr: torch.optim.SGD(p, lr=lr), lr=0.1, steps=1)
    (moved,) = train([start], data, plain)
    np.testing.assert_allclose(moved.network.outer, start.outer - 0.1 * slopes[0].numpy())
    np.testing.assert_allclose(moved.network.inner, start.inner - 0.1 * slopes[1].numpy())


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
        train_many(2, data, replace(good, last_lr=1.0), [0])
    with pytest.raises(TwoLayerError, match="several widths"):
        connect_pairs([], data, good)
    wild = Training(
        "wild", "max", 1.0, lambda p, lr: torch.optim.SGD(p, lr=1e9 * lr), lr=1e9, steps=60
    )
    with pytest.raises(TwoLayerError, match="diverged"):
        train_many(4, data, wild, [0])


def test_adamw_of_equal_betas_never_leaves_its_ball():
    data, method = random_data(1, 3, 2), training("AdamW", 0.7, 1)
    start = drawn(6, 2, seed=0)
    start = Network(start.outer.clip(-0.7, 0.7), start.inner.clip(-0.7, 0.7))
    for steps in (1, 2, 5, 40, 300):
        (found,) = train([start], data, replace(method, steps=steps))
        assert found.saturation <= 1 + 1e-9


def test_the_command_is_there(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        "isthmus.cli.lab_two_layer.run_two_layer", lambda out, quick: asked.append((out, quick))
    )
    shown = CliRunner().invoke(app, ["lab", "two-layer", "--quick", "--out", str(tmp_path)])
    assert shown.exit_code == 0
    assert asked == [(tmp_path, True)]
