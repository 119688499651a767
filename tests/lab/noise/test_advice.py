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
from isthmus.lab.noise.sizes import parameters
from isthmus.models.training_settings import BatchParts, TrainingSettings
from isthmus.optim.noise_scale import adaptive_noise_scale, effective_noise_scale

ROOT = Path(__file__).parents[3]


def parabola(
    name: str, best: float, *, height: float = 0.02, bend: float = 0.01, **given: object
) -> Experiment:
    """A gain that is highest at `best`, two decades either way."""
    scales = np.geomspace(best / 100, best * 100, 25)
    gains = height - bend * np.log10(scales / best) ** 2
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
        "optimizer": "adamw" if given.get("family") == "adaptive" else "sgd",
        "network": "convolutional",
        "split": "trunk",
        "described": "a toy",
        "parameters": 20_000,
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


def test_changes_do_not_lead_past_the_best_merged_model():
    """Where the gain only falls with noise, and the merged model is best in the middle all the same."""
    falling = parabola("falling", 1e-2)
    points = tuple(
        point.model_copy(
            update={
                "gain": -0.02 * number,
                "accuracy": 0.5 + 0.02 * number - 0.001 * (number - 12) ** 2,
            }
        )
        for number, point in enumerate(falling.points)
    )
    x, y = np.array([[point.noise_scale, point.gain] for point in points]).T
    curve = smooth_curve(x, y)
    found = falling.model_copy(
        update={
            "points": points,
            "optimum": optimum(curve),
            "bandwidth": curve.bandwidth,
            "spread": curve.spread,
        }
    )
    best = points[12].noise_scale
    advice = advise(sgd(5.0, 10), Evidence(experiments=(found,), decays=()))
    assert found.optimum.at < best < advice.noise_scale
    assert advice.changes[0].noise_scale == pytest.approx(best)


def test_batches_of_adaptive_optimizers_go_with_the_square():
    settings = adamw(4e-3, 16)
    advice = advise(settings, EVIDENCE)
    batch = next(change for change in advice.changes if change.setting == "batch size")
    found = advice.experiment
    factor = advice.noise_scale / max(found.optimum.at, found.most_accurate.noise_scale)
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


def only(experiment: Experiment) -> Evidence:
    return Evidence(experiments=(experiment,), decays=())


def test_the_collapse_is_where_the_curve_falls_below_its_scatter_for_good():
    advice = advise(sgd(0.1, 10), only(parabola("toy", 1e-2)))
    assert advice.collapse is not None
    experiment = advice.experiment
    places = np.geomspace(advice.collapse, experiment.range[1], 50)
    assert (experiment.curve.at(places) <= -experiment.spread).all()
    assert experiment.curve.at(np.array([advice.collapse / 1.1]))[0] > -experiment.spread
    # By the parabola: 0.02 = 0.01 log² at 10^√2 times the best place; the smoothed curve is near it.
    assert advice.collapse == pytest.approx(1e-2 * 10**2**0.5, rel=0.3)


def test_a_dip_is_no_collapse():
    toy = parabola("toy", 1e-2)
    points = tuple(
        point.model_copy(
            update={"gain": -0.05 if 0.05 < point.noise_scale < 0.1 else max(point.gain, 0.01)}
        )
        for point in toy.points
    )
    toy = toy.model_copy(update={"points": points, "bandwidth": 0.1, "spread": 0.012})
    low, high = advise(sgd(0.1, 10), only(toy)).good
    assert high < 0.1
    advice = advise(sgd(10.0, 25), only(toy))
    assert low < high < advice.noise_scale
    assert advice.collapse is None
    assert "nothing to change" in advice.verdict
    assert advice.changes == ()


def test_where_even_the_best_place_loses_there_is_no_collapse():
    advice = advise(sgd(0.1, 10), only(parabola("toy", 1e-2, height=-0.1)))
    assert advice.collapse is None
    assert "worse than its parents" in advice.verdict


def test_a_flat_curve_prefers_no_noise_scale():
    toy = parabola("toy", 1e-2, bend=1e-4).model_copy(update={"spread": 0.01})
    for lr in (0.002, 0.1, 5.0):
        advice = advise(sgd(lr, 10), only(toy))
        assert advice.flat
        assert advice.changes == ()
        assert "no noise scale is shown to be better" in advice.verdict
    assert not advise(sgd(0.1, 10), EVIDENCE).flat


def test_a_larger_rate_than_any_that_was_measured_is_named():
    costs = {change.setting: change.cost for change in advise(sgd(0.05, 50), EVIDENCE).changes}
    assert "more than was trained with here (η/(1 − μ) up to 0.1)" in costs["learning rate"]
    assert "more than was trained with" not in costs["batch size"]
    assert "more than was trained with" in costs["momentum"]


def test_factors_lead_from_the_old_value_to_the_new():
    for lr in (0.005, 5.0):
        for change in advise(sgd(lr, 10, 0.2), EVIDENCE).changes:
            old, new = change.old, change.value
            if change.setting == "momentum":
                old, new = 1 - old, 1 - new
            assert new == pytest.approx(old * change.factor)


def test_another_optimizer_is_named_as_standing_in():
    lion = replace(adamw(1e-4, 16), optimizer="lion_32bit")
    assert any(
        each.startswith("adamw stands in for lion_32bit") for each in advise(lion, EVIDENCE).assumed
    )
    for name in ("adam", "paged_adamw_8bit"):
        settings = replace(lion, optimizer=name)
        assert not any("stands in" in each for each in advise(settings, EVIDENCE).assumed)
    own = parabola("lion", 1e-4, family="adaptive", network="transformer", split="pretrained")
    own = own.model_copy(update={"optimizer": "lion"})
    both = Evidence(experiments=(*EVIDENCE.experiments, own), decays=())
    assert advise(lion, both).experiment.name == "lion"


def test_batches_of_parts_are_shown_and_untold_parts_named():
    settings = replace(sgd(0.1, 10), parts=BatchParts(5, 2))
    advice = advise(settings, EVIDENCE)
    assert "B = 5 · 2 · 1" in advice.formula
    assert any("--devices" in each for each in advice.assumed)
    assert not any("--accumulation" in each for each in advice.assumed)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Qwen/Qwen2.5-7B", "7 billion, 350,000 times as many"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "135 million, 6,750 times as many"),
        ("mistralai/Mixtral-8x7B-v0.1", "56 billion"),
        ("models/4bit-mine", "Yours may be larger"),
        ("tiny-30k-0.02M", "which is near"),
        ("tiny-0.002M", "10 times fewer"),
        ("resnet50", "Yours may be larger"),
        (None, "Yours may be larger"),
    ],
)
def test_the_size_of_the_model_is_told_by_its_name(model, words):
    assert words in advise(replace(sgd(0.1, 10), model=model), EVIDENCE).limits[0]


def test_adapters_were_not_measured():
    assert any(
        "adapter" in each for each in advise(replace(sgd(1, 9), adapter=True), EVIDENCE).limits
    )
    assert not any("adapter" in each for each in advise(sgd(1, 9), EVIDENCE).limits)


def test_parameters_of_an_mlp_and_of_unknown_data():
    made = {"architecture": "mlp", "data": "mnist", "width": 64, "depth": 2, "lr": 0.1}
    assert parameters(made) == (784 + 1) * 64 + (64 + 1) * 64 + (64 + 1) * 10
    assert parameters({**made, "pool": 2}) == (196 + 1) * 64 + (64 + 1) * 64 + (64 + 1) * 10
    assert parameters({**made, "data": "./pictures"}) is None
