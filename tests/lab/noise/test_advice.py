"""From settings to advice, against curves that were made up so that the answer is known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from isthmus.errors import TrainingError
from isthmus.lab.noise.advice import advise
from isthmus.lab.noise.curve import optimum, smooth_curve
from isthmus.lab.noise.evidence import Evidence, Experiment, Measured, evidence, gathered
from isthmus.models.training_settings import TrainingSettings
from isthmus.optim.noise_scale import adaptive_noise_scale, effective_noise_scale

ROOT = Path(__file__).parents[3]


def parabola(name: str, best: float, **given: object) -> Experiment:
    """A gain that is highest at `best`, two decades either way."""
    scales = np.geomspace(best / 100, best * 100, 25)
    gains = 0.02 - 0.01 * np.log10(scales / best) ** 2
    curve = smooth_curve(scales, gains)
    points = tuple(
        Measured(
            noise_scale=float(scale),
            gain=float(gain),
            deviation=0.001,
            accuracy=0.9,
            seeds=3,
            settings={"lr": 0.1, "batch": 10},
        )
        for scale, gain in zip(scales, gains, strict=True)
    )
    content = {
        "name": name,
        "method": "linear",
        "family": "sgd",
        "network": "convolutional",
        "split": "trunk",
        "described": "a toy",
        "epochs": 3,
        "command": "isthmus lab noise",
        "results": "results.json",
        "bandwidth": curve.bandwidth,
        "spread": curve.spread,
        "optimum": optimum(curve),
        "points": points,
    }
    return Experiment(**{**content, **given})


EVIDENCE = Evidence(
    experiments=(
        parabola("convolutions", 1e-2),
        parabola("start", 2e-2, split="start"),
        parabola("mlp", 3e-2, network="mlp"),
        parabola("decoder", 1e-3, family="adaptive", network="transformer"),
        parabola("tuned", 1e-4, family="adaptive", network="transformer", split="pretrained"),
        parabola(
            "tuned, ties",
            1e-4,
            family="adaptive",
            network="transformer",
            split="pretrained",
            method="ties",
        ),
    ),
    decays=(),
)


def sgd(lr: float, batch: int, momentum: float = 0.0) -> TrainingSettings:
    return TrainingSettings(
        lr=lr, batch_size=batch, momentum=momentum, optimizer="sgd", source="training.yaml"
    )


def adamw(lr: float, batch: int) -> TrainingSettings:
    return TrainingSettings(lr=lr, batch_size=batch, optimizer="adamw_torch", source="t.yaml")


def test_the_nearest_experiment():
    for settings, given, name in (
        (sgd(0.1, 10), {}, "convolutions"),
        (sgd(0.1, 10), {"split": "start"}, "start"),
        (sgd(0.1, 10), {"network": "mlp"}, "mlp"),
        (adamw(1e-4, 16), {}, "tuned"),
        (adamw(1e-4, 16), {"method": "ties"}, "tuned, ties"),
        (adamw(1e-4, 16), {"split": "trunk"}, "decoder"),
    ):
        assert advise(settings, EVIDENCE, **given).experiment.name == name


def test_what_stands_in_for_what_is_told():
    advice = advise(sgd(0.1, 10), EVIDENCE, network="transformer", split="trunk")
    assert advice.experiment.name == "convolutions"
    assert any("stands in for a transformer" in each for each in advice.assumed)
    assert not advise(sgd(0.1, 10), EVIDENCE, network="mlp", split="trunk").assumed


def test_nothing_to_change_at_the_best_place():
    advice = advise(sgd(0.1, 10), EVIDENCE)
    assert advice.noise_scale == pytest.approx(1e-2)
    assert advice.gain == pytest.approx(0.02, abs=0.001)
    assert "good stretch" in advice.verdict
    assert advice.changes == ()


@pytest.mark.parametrize(("lr", "words"), [(0.005, "too little noise"), (5.0, "too much noise")])
def test_every_change_leads_to_the_best_place(lr, words):
    settings = sgd(lr, 10, 0.2)
    advice = advise(settings, EVIDENCE)
    assert words in advice.verdict
    best = advice.experiment.optimum.at
    assert advice.good[0] < best < advice.good[1]
    names = {"learning rate": "lr", "batch size": "batch_size", "momentum": "momentum"}
    assert advice.changes
    for change in advice.changes:
        value = int(change.value) if change.setting == "batch size" else change.value
        changed = replace(settings, **{names[change.setting]: value})
        expected = effective_noise_scale(changed.lr, changed.batch_size, changed.momentum)
        assert change.noise_scale == pytest.approx(expected)
        assert advice.good[0] < expected < advice.good[1]
        # A batch is a whole number of examples.
        assert expected == pytest.approx(best, rel=0.2)


def test_batches_of_adaptive_optimizers_go_with_the_square():
    settings = adamw(4e-3, 16)
    advice = advise(settings, EVIDENCE)
    batch = next(change for change in advice.changes if change.setting == "batch size")
    factor = advice.noise_scale / advice.experiment.optimum.at
    assert batch.value == pytest.approx(16 * factor**2, rel=0.01)
    assert adaptive_noise_scale(4e-3, int(batch.value)) == pytest.approx(batch.noise_scale)
    assert all(change.setting != "momentum" for change in advice.changes)


def test_no_batch_of_a_few_examples_and_no_negative_momentum_is_proposed():
    little = advise(sgd(0.001, 4), EVIDENCE)
    assert [change.setting for change in little.changes] == ["learning rate", "momentum"]
    much = advise(sgd(5.0, 10), EVIDENCE)
    assert "momentum" not in {change.setting for change in much.changes}


@pytest.mark.parametrize(("lr", "side"), [(1e-6, "below"), (1e4, "above")])
def test_the_curve_is_not_drawn_on(lr, side):
    advice = advise(sgd(lr, 10), EVIDENCE)
    assert advice.gain is None
    assert f"times {side} what was measured" in advice.verdict
    assert advice.changes == ()


def test_the_nearest_points_are_the_nearest():
    advice = advise(sgd(0.2, 10), EVIDENCE)
    apart = sorted(
        abs(math.log(point.noise_scale / advice.noise_scale)) for point in advice.experiment.points
    )
    got = sorted(abs(math.log(point.noise_scale / advice.noise_scale)) for point in advice.nearest)
    assert got == apart[:3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": None}, "does not tell the learning rate"),
        ({"batch_size": None}, "does not tell the batch size"),
        ({"optimizer": None}, "does not tell the optimizer"),
        ({"optimizer": "adamv"}, "there is no optimizer 'adamv'"),
        ({"lr": 0.0}, "trains nothing"),
    ],
)
def test_what_cannot_be_advised(changes, words):
    with pytest.raises(TrainingError, match=words):
        advise(replace(sgd(0.1, 10), **changes), EVIDENCE)


def test_names_of_optimizers():
    for name, adaptive in (
        ("paged_adamw_8bit", True),
        ("schedule_free_sgd", False),
        ("SGD", False),
        ("Muon", True),
        ("adafactor", True),
    ):
        settings = replace(sgd(0.1, 10), optimizer=name)
        assert settings.adaptive is adaptive
        advise(settings, EVIDENCE)


def test_nothing_measured():
    only = Evidence(experiments=EVIDENCE.experiments[:1], decays=())
    with pytest.raises(TrainingError, match="Nothing was measured for adaptive"):
        advise(adamw(1e-4, 8), only)


def test_the_evidence_is_that_of_the_results():
    files = [
        ROOT / f"benchmarks/results/lab-noise-{kind}.json" for kind in ("text", "transfer", "pairs")
    ]
    results = [
        (str(file.relative_to(ROOT)), json.loads(file.read_text("utf-8")))
        for file in files
        if file.exists()
    ]
    assert results
    assert gathered(results) == evidence()


def test_curves_of_the_evidence_are_those_of_its_points():
    for each in evidence().experiments:
        x, y = np.array([[point.noise_scale, point.gain] for point in each.points]).T
        again = smooth_curve(x, y)
        assert again.bandwidth == each.bandwidth
        assert again.spread == pytest.approx(each.spread)
        assert optimum(again).at == pytest.approx(each.optimum.at)
