"""Training that can be stopped anywhere, and stops by itself where it diverges."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from isthmus.errors import IsthmusError
from isthmus.lab.data import named
from isthmus.lab.networks.state import seeded, state
from isthmus.lab.noise import training
from isthmus.lab.noise.data import noise_data
from isthmus.lab.noise.networks import made_network, symmetries
from isthmus.lab.noise.settings import PairSettings, SingleSettings, TrainingSettings
from isthmus.lab.noise.training import mean_loss, train
from isthmus.lab.sweeps.diverged import Diverged

SMALL = {"data": "digits", "examples": 120, "test": 100, "width": 8, "depth": 1, "batch": 16}
NOWHERE = Path("nowhere")


class Killed(BaseException):
    pass


def made(settings):
    data = noise_data(settings, NOWHERE)
    seeded(0)
    return made_network(settings, data), data


def trained(settings, checkpoint=None):
    network, data = made(settings)
    curve = train(
        network, data, settings, epochs=(0, settings.epochs), order=(0, 0), checkpoint=checkpoint
    )
    return state(network), curve


@pytest.mark.parametrize(
    "given",
    [
        {"momentum": 0.9, "weight_decay": 1e-3},
        {"optimizer": "adamw", "lr": 1e-2, "schedule": "cosine"},
        {"optimizer": "muon", "lr": 1e-2, "momentum": 0.9},
        {"optimizer": "lion", "lr": 3e-3},
        {"architecture": "resnet", "augment": 1},
    ],
    ids=str,
)
def test_killed_in_the_middle_of_an_epoch_it_ends_in_the_same_bits(given, tmp_path, monkeypatch):
    settings = TrainingSettings(**{**SMALL, "epochs": 3, **given})
    whole, curve = trained(settings)
    monkeypatch.setattr(training, "_SECONDS", 0.0)
    steps = 0

    def dies(network, batch):
        nonlocal steps
        steps += 1
        if steps == 11:
            raise Killed
        return mean_loss(network, batch)

    place = tmp_path / "checkpoint.pt"
    monkeypatch.setattr(training, "mean_loss", dies)
    with pytest.raises(Killed):
        trained(settings, place)
    monkeypatch.setattr(training, "mean_loss", mean_loss)
    resumed, again = trained(settings, place)
    assert again == curve
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


@pytest.mark.parametrize("left", [0, 1, 500, 2000, -1])
def test_from_a_damaged_checkpoint_it_begins_anew(left, tmp_path):
    settings = TrainingSettings(**SMALL, epochs=2)
    whole, curve = trained(settings, tmp_path / "c.pt")
    content = (tmp_path / "c.pt").read_bytes()
    (tmp_path / "c.pt").write_bytes(content[:left])
    again, other = trained(settings, tmp_path / "c.pt")
    assert other == curve
    assert all(torch.equal(again[name], value) for name, value in whole.items())
    (tmp_path / "c.pt").write_bytes(b"junk" * 100)
    assert trained(settings, tmp_path / "c.pt")[1] == curve


def test_a_training_that_is_over_is_not_done_again(tmp_path, monkeypatch):
    settings = TrainingSettings(**SMALL, epochs=2)
    first, _ = trained(settings, tmp_path / "c.pt")

    def never(*_):
        raise AssertionError

    monkeypatch.setattr(training, "mean_loss", never)
    again, _ = trained(settings, tmp_path / "c.pt")
    assert all(torch.equal(again[name], value) for name, value in first.items())


@pytest.mark.parametrize("lr", [1e3, 1e30])
def test_divergence(lr):
    with pytest.raises(Diverged) as caught:
        trained(TrainingSettings(**SMALL, lr=lr, epochs=10))
    assert 0 < caught.value.step <= 70


def test_a_single_peak_is_no_divergence(monkeypatch):
    steps = 0

    def peaks(network, batch):
        nonlocal steps
        steps += 1
        return mean_loss(network, batch) + (1000 if steps == 5 else 0)

    monkeypatch.setattr(training, "mean_loss", peaks)
    trained(TrainingSettings(**SMALL, epochs=10))
    assert steps == 70


def test_one_that_learns_nothing_has_diverged():
    with pytest.raises(Diverged):
        trained(TrainingSettings(**SMALL, lr=1e-9, epochs=1))


@pytest.mark.parametrize("architecture", ["mlp", "resnet", "densenet", "vit"])
def test_every_network_learns(architecture):
    settings = TrainingSettings(
        **{**SMALL, "examples": 400, "width": 16, "epochs": 8, "optimizer": "adamw", "lr": 5e-3},
        architecture=architecture,
    )
    network, data = made(settings)
    curve = train(network, data, settings, epochs=(0, 8), order=(0, 0))
    assert curve[-1] < 0.85 * curve[0]
    assert not network.training


def test_orders_differ_and_nothing_else():
    settings = TrainingSettings(**SMALL, epochs=4)
    ends = []
    for order in ((0, 1), (0, 1), (0, 2)):
        network, data = made(settings)
        train(network, data, settings, epochs=(0, 4), order=order)
        ends.append(network.state_dict())
    for name, value in ends[0].items():
        assert torch.equal(ends[1][name], value)
        assert not torch.equal(ends[2][name], value)


def test_two_halves_of_plain_descent_are_the_whole():
    """Without momentum a training that is cut at an epoch is the same training."""
    settings = TrainingSettings(**SMALL, epochs=2, schedule="cosine")
    whole, _ = trained(settings)
    network, data = made(settings)
    for epochs in ((0, 1), (1, 2)):
        train(network, data, settings, epochs=epochs, order=(0, 0))
    assert all(torch.equal(state(network)[name], value) for name, value in whole.items())


def test_pictures_are_shifted_and_not_changed():
    picture = torch.zeros(1, 1, 5, 5)
    picture[0, 0, 2, 2] = 1
    for down in range(3):
        for right in range(3):
            moved = training._shifted(picture, torch.tensor([[down], [right]]), 1)
            assert moved.sum() == 1
            # From 0, which is one pixel of the padding, to two pixels on.
            assert moved[0, 0, 3 - down, 3 - right] == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch": 200}, "more than the 120 examples"),
        ({"batch": 1, "architecture": "resnet"}, "batch of 2 examples"),
        ({"augment": 1, "architecture": "decoder", "data": "kernel"}, "augment shifts pictures"),
        ({"lr": 0}, "greater than 0"),
        ({"lr": math.inf}, "finite number"),
        ({"weight_decay": math.nan}, "finite number"),
        ({"momentum": 1}, "less than 1"),
        ({"optimizer": "adamv"}, "Input should be"),
        ({"colour": "red"}, "Extra inputs"),
    ],
)
def test_settings_that_no_training_has(settings, words):
    with pytest.raises(ValidationError, match=words):
        TrainingSettings(**{**SMALL, **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shared": 10, "epochs": 10}, "leave nothing of 10"),
        ({"seed": 2**63}, "less than"),
        ({"rebasin": True, "architecture": "vit"}, "rebasin is for mlp and resnet"),
    ],
)
def test_settings_that_no_pair_has(settings, words):
    with pytest.raises(ValidationError, match=words):
        PairSettings(**{**SMALL, **settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"examples": 10_000}, "examples to train, not 10000"),
        ({"test": 10_000}, "examples to test, not 10000"),
        ({"pool": 9}, "cannot be pooled"),
        ({"architecture": "decoder"}, "A decoder reads text"),
        ({"data": "digit"}, "Did you mean 'digits'"),
    ],
)
def test_data_that_do_not_fit(settings, words):
    with pytest.raises(IsthmusError, match=words):
        made(SingleSettings(**{**SMALL, **settings}))


def test_symmetries_that_nobody_described():
    settings = TrainingSettings(**SMALL, architecture="vit")
    network, _ = made(settings)
    with pytest.raises(IsthmusError, match="symmetries of vit"):
        symmetries(network, settings)


def test_the_cosine_falls_from_the_whole_rate_to_none(monkeypatch):
    """Against torch's own schedule, over the steps of all epochs."""
    rates = []
    step = torch.optim.SGD.step

    def listening(self, *arguments, **more):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *arguments, **more)

    monkeypatch.setattr(torch.optim.SGD, "step", listening)
    trained(TrainingSettings(**SMALL, lr=0.3, epochs=4, schedule="cosine"))
    monkeypatch.undo()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(rates))
    expected = []
    for _ in rates:
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert len(rates) == 28
    assert rates == pytest.approx(expected)


def test_augmentation_is_the_same_for_the_same_order_and_changes_every_epoch():
    settings = TrainingSettings(**SMALL, augment=1)
    data = noise_data(settings, NOWHERE)

    def epoch(order, number, skipped=0):
        return list(training._batches(data, settings, order, number, skipped))

    first, again = epoch((0, 1), 0), epoch((0, 1), 0)
    assert len(first) == 7
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    for resumed, whole in zip(epoch((0, 1), 0, 4), first[4:], strict=True):
        assert torch.equal(resumed[0], whole[0])
    assert not torch.equal(first[0][0], epoch((0, 1), 1)[0][0])
    assert not torch.equal(first[0][0], epoch((0, 2), 0)[0][0])


def test_an_epoch_sees_every_example_once():
    settings = TrainingSettings(**{**SMALL, "batch": 15})
    data = noise_data(settings, NOWHERE)
    seen = torch.cat([x for x, _ in training._batches(data, settings, (0, 0), 0, 0)])
    rows = sorted(map(tuple, seen.flatten(1).tolist()))
    assert rows == sorted(map(tuple, data.inputs.flatten(1).tolist()))


def test_a_decoder_learns():
    text = "the cat sat on the mat; the dog sat on the log. " * 60
    data = named._text(text, text[:400], 16, "rhymes")
    settings = TrainingSettings(
        architecture="decoder", context=16, width=32, depth=1, batch=16, optimizer="adamw", lr=5e-3
    )
    seeded(0)
    network = made_network(settings, data)
    curve = train(network, data, settings, epochs=(0, 3), order=(0, 0))
    assert curve[0] < math.log(256)
    assert curve[2] < 0.7 * curve[0]
