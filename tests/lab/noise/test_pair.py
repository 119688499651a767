"""Pairs and transfers: what is measured is what independent code measures."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from isthmus.lab.networks.state import seeded, state
from isthmus.lab.noise import pair, training, transfer
from isthmus.lab.noise.data import noise_data
from isthmus.lab.noise.networks import made_network
from isthmus.lab.noise.pair import run_pair
from isthmus.lab.noise.settings import PairSettings, TransferSettings
from isthmus.lab.noise.transfer import run_transfer

SMALL = {"data": "digits", "examples": 200, "test": 150, "width": 12, "depth": 1, "batch": 16}


def quiet(_share):
    pass


@pytest.fixture
def watched(monkeypatch):
    """The weights that trainings of a pair end in."""
    ends = []
    train = pair.train

    def listening(network, *arguments, **more):
        curve = train(network, *arguments, **more)
        ends.append(copy.deepcopy(state(network)))
        return curve

    monkeypatch.setattr(pair, "train", listening)
    return ends


def judged(settings, weights):
    """Accuracy and loss, by hand; statistics of BatchNorm from all training examples in one batch."""
    data = noise_data(settings, Path("nowhere"))
    network = made_network(settings, data)
    network.load_state_dict(weights)
    norms = [each for each in network.modules() if isinstance(each, nn.BatchNorm2d)]
    for each in norms:
        each.reset_running_stats()
        each.momentum = None
    if norms:
        network.train()
        with torch.no_grad():
            network(data.inputs)
    network.eval()
    with torch.no_grad():
        logits = network(data.test_inputs)
    loss = nn.functional.cross_entropy(logits, data.test_targets)
    return float((logits.argmax(-1) == data.test_targets).double().mean()), float(loss)


@pytest.mark.parametrize("architecture", ["mlp", "resnet"])
def test_gains_are_those_of_the_averaged_weights(architecture, watched, tmp_path):
    settings = PairSettings(**SMALL, architecture=architecture, epochs=3, shared=1, lr=0.05)
    found = run_pair(settings, tmp_path, quiet, cache=Path("nowhere"))
    _, a, b = watched
    middle = {name: (a[name].double() + b[name].double()) / 2 for name in a}
    middle = {name: value.to(a[name].dtype) for name, value in middle.items()}
    (a_accuracy, a_loss), (b_accuracy, b_loss), merged = (
        judged(settings, weights) for weights in (a, b, middle)
    )
    assert found["accuracy"] == pytest.approx((a_accuracy + b_accuracy) / 2, abs=0.01)
    assert found["loss"] == pytest.approx((a_loss + b_loss) / 2, rel=1e-3)
    assert found["merged_accuracy"] == pytest.approx(merged[0], abs=0.01)
    assert found["merged_loss"] == pytest.approx(merged[1], rel=1e-3)
    assert found["gain"] == pytest.approx(found["merged_accuracy"] - found["accuracy"])
    assert found["gain_over_best"] == pytest.approx(
        found["merged_accuracy"] - max(a_accuracy, b_accuracy), abs=0.01
    )
    assert found["loss_gain"] == pytest.approx(found["loss"] - found["merged_loss"])
    flat_a, flat_b = (
        torch.cat(
            [w.double().flatten() for n, w in each.items() if "running" not in n and "num" not in n]
        )
        for each in (a, b)
    )
    apart = float((flat_a - flat_b).norm() / flat_a.norm())
    assert found["distance"] == pytest.approx(apart)


def test_branches_begin_where_the_trunk_ends(watched, tmp_path):
    settings = PairSettings(**SMALL, epochs=9, shared=8, lr=1e-2, momentum=0.9)
    found = run_pair(settings, tmp_path, quiet, cache=Path("nowhere"))
    trunk, a, b = watched
    apart = [float((a[name] - b[name]).norm()) for name in a]
    moved = [float((a[name] - trunk[name]).norm()) for name in a]
    assert 0 < max(apart) < 2 * max(moved)
    assert found["distance"] < 0.05
    assert found["cka"] > 0.99
    assert found["barrier"] < 1e-3
    assert len(found["curves"]["trunk"]) == 8
    assert len(found["curves"]["a"]) == len(found["curves"]["b"]) == 1


def test_the_same_pair_twice(tmp_path):
    settings = PairSettings(**SMALL, epochs=2)
    one, other = (run_pair(settings, tmp_path, quiet, cache=Path("nowhere")) for _ in range(2))
    assert one == other


def test_matching_brings_pairs_from_a_common_start_no_further_apart(tmp_path):
    settings = PairSettings(
        **{**SMALL, "batch": 4, "lr": 0.3, "epochs": 12, "width": 24}, rebasin=True
    )
    found = run_pair(settings, tmp_path, quiet, cache=Path("nowhere"))
    assert found["rebasin_distance"] <= found["distance"] + 1e-9


def test_nothing_is_left_of_checkpoints(tmp_path):
    run_pair(PairSettings(**SMALL, epochs=2), tmp_path, quiet, cache=Path("nowhere"))
    assert not list(tmp_path.iterdir())


def test_the_share_that_is_done_rises_to_one(tmp_path):
    told = []
    settings = PairSettings(**SMALL, epochs=3, shared=1)
    run_pair(settings, tmp_path, told.append, cache=Path("nowhere"))
    assert told == sorted(told)
    assert told[-1] == pytest.approx(1)


TRANSFER = {
    "architecture": "mlp",
    "data": "digits",
    "source": "digits",
    "examples": 300,
    "test": 200,
    "width": 16,
    "depth": 1,
    "batch": 16,
    "optimizer": "adamw",
    "lr": 4e-3,
    "epochs": 2,
    "source_examples": 300,
    "source_epochs": 5,
    "source_lr": 2e-2,
    "validation": 60,
}


def test_a_transfer(tmp_path):
    settings = TransferSettings(**TRANSFER)
    found = run_transfer(settings, tmp_path, quiet, cache=tmp_path / "cache")
    assert found["noise_scale"] == pytest.approx(4e-3 / 4)
    for method in ("linear", "task_arithmetic", "ties"):
        assert found[f"{method}_gain"] == pytest.approx(
            found[f"{method}_accuracy"] - found["accuracy"]
        )
    assert found["accuracy"] > found["base_accuracy"] - 0.05
    assert -1 <= found["cosine"] <= 1
    assert found["task_arithmetic_setting"].startswith("λ")


def test_halves_are_learnt_apart(tmp_path, monkeypatch):
    classes = []
    train = transfer.train

    def listening(network, data, *arguments, **more):
        classes.append(set(data.targets.tolist()))
        return train(network, data, *arguments, **more)

    monkeypatch.setattr(transfer, "train", listening)
    settings = TransferSettings(**TRANSFER, tasks="halves")
    run_transfer(settings, tmp_path, quiet, cache=tmp_path / "cache")
    assert classes[-2:] == [set(range(5)), set(range(5, 10))]


def test_what_validates_is_not_trained_on(tmp_path, monkeypatch):
    seen = []
    train = transfer.train

    def listening(network, data, *arguments, **more):
        seen.append(data.inputs.clone())
        return train(network, data, *arguments, **more)

    monkeypatch.setattr(transfer, "train", listening)
    settings = TransferSettings(**TRANSFER)
    whole = noise_data(settings.model_copy(update={"examples": 360}), Path("nowhere"))
    validation = {tuple(row.flatten().tolist()) for row in whole.inputs[:60]}
    run_transfer(settings, tmp_path, quiet, cache=tmp_path / "cache")
    for inputs in seen[-2:]:
        assert len(inputs) == 300
        assert not validation & {tuple(row.flatten().tolist()) for row in inputs}


def test_the_pretrained_network_is_trained_once(tmp_path, monkeypatch):
    count = []
    train = transfer.train

    def listening(*arguments, **more):
        count.append(1)
        return train(*arguments, **more)

    monkeypatch.setattr(transfer, "train", listening)
    for lr in (2e-3, 4e-3):
        settings = TransferSettings(**{**TRANSFER, "lr": lr})
        folder = tmp_path / str(lr)
        folder.mkdir()
        run_transfer(settings, folder, quiet, cache=tmp_path / "cache")
    assert len(count) == 1 + 2 + 2


def test_test_data_choose_nothing(tmp_path, monkeypatch):
    """With the classes of all test pictures exchanged, the same λ and densities are taken."""
    settings = TransferSettings(**TRANSFER)
    found = [run_transfer(settings, tmp_path, quiet, cache=tmp_path / "cache")]
    given = noise_data(settings, Path("nowhere"))
    other = (given.test_targets + 1) % 10

    def exchanged(*arguments):
        data = noise_data(*arguments)
        return dataclasses.replace(data, test_targets=other)

    monkeypatch.setattr(transfer, "noise_data", exchanged)
    for checkpoint in tmp_path.glob("*.pt"):
        checkpoint.unlink()
    found.append(run_transfer(settings, tmp_path, quiet, cache=tmp_path / "cache"))
    one, wrong = found
    assert wrong["ties_accuracy"] < one["ties_accuracy"] - 0.3
    for method in ("task_arithmetic", "ties"):
        assert one[f"{method}_setting"] == wrong[f"{method}_setting"]


def test_matching_finds_a_copy_whose_units_were_exchanged(tmp_path):
    """A network and its permuted copy: far apart, and the same once matched."""
    settings = PairSettings(**{**SMALL, "test": 60}, rebasin=True, epochs=8, lr=0.2)
    data = noise_data(settings, tmp_path)
    seeded(0)
    network = made_network(settings, data)
    training.train(network, data, settings, epochs=(0, 8), order=(0, 0))
    a = state(network)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    b = {name: value.clone() for name, value in a.items()}
    b["1.weight"], b["1.bias"] = a["1.weight"][order], a["1.bias"][order]
    b["3.weight"] = a["3.weight"][:, order]
    found = pair._judged(settings, data, network, a, b)
    assert found["distance"] > 0.5
    assert found["barrier"] > 0.05
    assert found["rebasin_barrier"] == pytest.approx(0, abs=1e-5)
    assert found["rebasin_distance"] == pytest.approx(0, abs=1e-6)
    assert found["cka"] == pytest.approx(1, abs=1e-5)
