from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from isthmus.lab.data.pictures import Pictures
from isthmus.lab.projection.digits import make_layer, run_all_digits, run_digits
from isthmus.lab.projection.digits_results import DigitsSettings

SETTINGS = DigitsSettings(
    experts=(3,),
    seeds=(0,),
    base=60,
    train=100,
    calibration=(40,),
    validation=60,
    test=150,
    epochs=2,
    tries=3,
    ranks=(1, 2),
)


class Made:
    """Stands for `Pictures`: ten patterns and noise."""

    def __init__(self):
        chance = np.random.default_rng(0)
        patterns = chance.integers(0, 160, (10, 7, 7)).repeat(4, axis=1).repeat(4, axis=2)
        self.files = {}
        for part, size in (("train", 1600), ("test", 200)):
            labels = chance.integers(0, 10, size)
            noise = chance.integers(0, 96, (size, 28, 28))
            self.files[part, "images"] = (patterns[labels] + noise).astype(np.uint8)
            self.files[part, "labels"] = labels.astype(np.uint8)

    def array(self, _source, part, kind):
        return self.files[part, kind]


@pytest.fixture(scope="module")
def run():
    return run_digits(Made(), SETTINGS, 3, 40, 0)


def test_subsets_share_no_digit(run):
    assert sorted(sum(run.subsets, ())) == [*range(10)]
    assert len(run.experts) == 3


def test_error_and_accuracies_are_those_of_pictures_one_by_one():
    layer = make_layer(Made(), SETTINGS, 3, 40, 0)
    correction = layer.task_vectors.mean(dim=0)
    merged = layer.base + correction
    squares, hits, own_hits = 0.0, 0, 0
    for x, digit in zip(layer.test.inputs, layer.test.digits.tolist(), strict=True):
        k = next(k for k, subset in enumerate(layer.subsets) if digit in subset)
        squares += float((merged @ x - layer.experts[k] @ x).square().sum())
        outputs = (merged @ x).tolist()
        hits += max(range(10), key=outputs.__getitem__) == digit
        own_hits += max(layer.subsets[k], key=outputs.__getitem__) == digit
    count = len(layer.test.digits)
    assert layer.error(correction, layer.test) == pytest.approx(squares / count)
    assert layer.accuracy(correction, layer.test) == pytest.approx(hits / count)
    assert layer.accuracy_within(correction, layer.test) == pytest.approx(own_hits / count)


def test_experts_learn_their_own_digits():
    layer = make_layer(Made(), SETTINGS, 3, 40, 0)
    for expert, subset in zip(layer.experts, layer.subsets, strict=True):
        own = layer.test.of(subset)
        losses = [
            torch.nn.functional.cross_entropy(own.inputs @ weight.mT, own.digits)
            for weight in (expert, layer.base)
        ]
        assert losses[0] < losses[1]


def test_the_base_captures_nothing(run):
    base = run.rows[0]
    assert (base.name, base.captured, base.held_out) == ("base", 0, 0)


def test_larger_bases_capture_more(run):
    captured = {row.name: row.captured for row in run.rows}
    chain = ["soup", "QP scalar", "QP diagonal", "QP optimal, all weights"]
    energies = [captured[name] for name in chain]
    assert energies == sorted(energies)
    assert captured["QP columns"] >= captured["QP scalar"]
    assert captured["QP optimal, rank 1"] <= captured["QP optimal, rank 2"]
    for row in (*run.rows, *run.many):
        assert row.captured <= captured["QP optimal, all weights"] + 1e-9
    assert captured["QP elementwise, box"] >= captured["soup"] - 1e-9


def test_no_heuristic_beats_the_solution_of_a_basis_that_holds_it(run):
    assert run.compared == 25
    assert run.violations == ()


def test_all_runs_are_written_and_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Pictures, "array", lambda _self, *which: Made().array(*which))
    found = run_all_digits(tmp_path, settings=replace(SETTINGS, seeds=(0, 1)))
    assert [(len(run.subsets), run.seed) for run in found.runs] == [(3, 0), (3, 1)]
    mean = {row.name: row for row in found.mean(3, 40)}
    ones = [row for run in found.runs for row in run.rows if row.name == "soup"]
    assert mean["soup"].accuracy == pytest.approx(sum(row.accuracy for row in ones) / 2)
    assert (tmp_path / "results.json").is_file()
    told = " ".join(capsys.readouterr().out.split())
    assert "50 comparisons" in told
    assert "3 experts, 40 pictures: all" in told
    assert found.correlation(3, 40, "captured", "captured", "rank") == pytest.approx(1)
