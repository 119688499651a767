from __future__ import annotations

import io
import math

import pytest
import torch
from rich.console import Console

import isthmus
from isthmus.lab.progress import Narrator
from isthmus.lab.projection import language
from isthmus.lab.projection.contests import ModelContest, projection
from isthmus.lab.projection.language import DOMAINS, draw, run_language
from isthmus.lab.projection.language_model import LanguageModel, untrained
from isthmus.lab.projection.language_settings import LanguageSettings, Steps
from isthmus.lab.text import Corpus

SETTINGS = LanguageSettings(
    layers=2,
    width=16,
    inner=24,
    heads=2,
    vocabulary=300,
    length=16,
    pretraining=Steps(3, 4, 1e-3),
    fine_tuning=Steps(8, 4, 1e-2),
    pretraining_texts=10,
    training_texts=12,
    calibration=8,
    validation=3,
    test=5,
    tries=3,
    threads=1,
)

WORDS = {"films": "a plot of stars", "news": "minister market bank", "e-mail": "list patch build"}


def corpus(name):
    texts = tuple(f"{WORDS[name]} number {number} of {name}" for number in range(40))
    return Corpus(name, ("one",), texts, (0,) * len(texts))


def test_parts_share_no_text_and_the_bases_texts_have_no_seed():
    first, other = (draw(corpus("news"), SETTINGS, seed) for seed in (0, 1))
    assert first.pretraining == other.pretraining
    assert first.test != other.test
    parts = (first.pretraining, first.training, first.validation, first.test)
    assert [len(part) for part in parts] == [10, 12, 3, 5]
    assert len(set().union(*parts)) == 30


def test_loss_is_the_mean_over_tokens():
    model = untrained(corpus("news").texts, SETTINGS)
    texts = ["bank", "a minister of the market and the bank", "market bank"]
    total, count = 0.0, 0
    for text in texts:
        ids = torch.tensor(model.tokenizer(text)["input_ids"][: SETTINGS.length])
        with torch.no_grad():
            logits = model.model(ids[None]).logits[0].log_softmax(dim=1)
        total -= float(logits[:-1].gather(1, ids[1:, None]).sum())
        count += len(ids) - 1
    assert model.loss(texts) == pytest.approx(total / count, rel=1e-5)
    # With random weights every token is about equally likely.
    assert model.loss(texts) == pytest.approx(math.log(SETTINGS.vocabulary), rel=0.1)


def test_training_lowers_the_loss_and_leaves_the_original():
    model = untrained(corpus("news").texts, SETTINGS)
    before = model.loss(corpus("news").texts)
    tuned = model.tuned(corpus("news").texts, Steps(20, 4, 1e-2), 0, lambda _: None)
    assert tuned.loss(corpus("news").texts) < before
    assert model.loss(corpus("news").texts) == before


def test_a_model_comes_back_from_disk(tmp_path):
    model = untrained(corpus("news").texts, SETTINGS)
    model.save(tmp_path)
    again = LanguageModel.load(tmp_path, SETTINGS.length)
    assert again.loss(corpus("films").texts) == model.loss(corpus("films").texts)


def test_a_run_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(language, "load_movies", lambda _: corpus("films"))
    monkeypatch.setattr(language, "load_news", lambda: corpus("news"))
    monkeypatch.setattr(language, "load_spam", lambda _: corpus("e-mail"))
    contests = (
        ModelContest("task_arithmetic", "task_arithmetic", scaled=True),
        projection("projection optimal", sequential=False, basis="optimal"),
        projection("projection diagonal seq.", sequential=True, basis="diagonal"),
    )
    console = Console(file=io.StringIO(), width=120)
    options = {"merge": isthmus.merge, "cache": tmp_path / "cache", "settings": SETTINGS}
    options |= {"contests": contests, "narrator": Narrator(console)}
    found = run_language(tmp_path / "out", **options)
    rows = {row.name: row for row in found.rows}
    for domain in DOMAINS:
        assert rows["single experts"].loss[domain] == rows[f"{domain} expert"].loss[domain]
        assert rows[f"{domain} expert"].loss[domain] < rows["base"].loss[domain]
    assert rows["task_arithmetic"].setting.startswith("λ=")
    assert rows["projection optimal"].captured >= rows["task_arithmetic"].captured - 1e-6
    assert found.checks.compared > 0
    assert found.checks.violations == ()
    assert "Perplexity" in console.file.getvalue()

    monkeypatch.setattr(LanguageModel, "tuned", None)  # nothing is trained again
    again = run_language(tmp_path / "out", **options)
    assert [row.loss for row in again.rows] == [row.loss for row in found.rows]
