"""Transfers to tasks of text: against loops of torch's own, killed, diverging, refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from isthmus.errors import IsthmusError
from isthmus.lab.encoders import Encoder
from isthmus.lab.noise import text_transfer, training
from isthmus.lab.noise.grids import PanelPlan, noise_grid
from isthmus.lab.noise.results import panel
from isthmus.lab.noise.tables import point_grid
from isthmus.lab.noise.text_settings import TextTransferSettings
from isthmus.lab.noise.text_transfer import run_text_transfer
from isthmus.lab.noise.transfer_merges import LAMBDAS, TIES, merge_figures
from isthmus.lab.progress import Narrator
from isthmus.lab.sweeps.diverged import Diverged
from isthmus.lab.sweeps.experiments import experiment_of
from isthmus.lab.sweeps.plan import Sweep, planned
from isthmus.lab.sweeps.reading import read_sweep
from isthmus.lab.sweeps.record import RunRecord
from isthmus.lab.sweeps.run import run_sweep
from isthmus.lab.text import Corpus

ROOT = Path(__file__).parents[3]
METHODS = ("linear", "task_arithmetic", "ties")
SMALL = TextTransferSettings(
    examples=32, validation=20, test=30, tokens=12, lr=1e-3, batch=8, epochs=2
)


def corpus(name: str, classes: int, good: str) -> Corpus:
    """Texts that one word tells apart, with others for noise."""
    draw = np.random.default_rng(len(name))
    words = ["film", "match", "plane", "song", "river", "night", "cat", "house", "tree"]
    labels = [int(label) for label in draw.integers(0, classes, 300)]
    texts = [
        f"{number} {' '.join(draw.choice(words, 4))} {' '.join([good] * label)}"
        for number, label in enumerate(labels)
    ]
    return Corpus(name, tuple(map(str, range(classes))), tuple(texts), tuple(labels))


@pytest.fixture
def small(small_encoder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small encoder with random weights, and easy texts."""
    monkeypatch.setattr(text_transfer, "minilm", lambda: small_encoder)
    loaders = {
        "movies": lambda: corpus("movies", 2, "splendid"),
        "tweets": lambda: corpus("tweets", 3, "awful"),
    }
    monkeypatch.setattr(text_transfer, "LOADERS", loaders)
    return small_encoder


def ran(
    settings: TextTransferSettings,
    folder: Path,
    tell: Callable[[float], None] = lambda _share: None,
) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return dict(run_text_transfer(settings, folder, tell, cache=folder.parent))


def changed(**updates: Any) -> TextTransferSettings:
    return TextTransferSettings(**SMALL.model_dump() | updates)


@pytest.mark.usefixtures("small")
def test_the_figures_are_those_of_the_other_transfer_and_shares_are_told(tmp_path: Path) -> None:
    shares: list[float] = []
    found = ran(SMALL, tmp_path / "run", shares.append)
    assert set(found) == {
        "noise_scale",
        "accuracy",
        "base_accuracy",
        "distance",
        "cosine",
        *(f"{method}_{figure}" for method in METHODS for figure in ("accuracy", "gain", "setting")),
    }
    assert found["noise_scale"] == pytest.approx(1e-3 / 8**0.5)
    for method in METHODS:
        gain = found[f"{method}_accuracy"] - found["accuracy"]
        assert found[f"{method}_gain"] == pytest.approx(gain)
        assert 0 <= found[f"{method}_accuracy"] <= 1
    assert found["distance"] > 0
    assert -1 < found["cosine"] < 1
    assert shares == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.usefixtures("small")
def test_the_same_seed_gives_the_same_and_another_does_not(tmp_path: Path) -> None:
    one, again, other = (
        ran(changed(seed=seed), tmp_path / name) for name, seed in (("a", 5), ("b", 5), ("c", 6))
    )
    assert one == again
    assert one["distance"] != other["distance"]


def test_an_expert_is_what_a_plain_loop_of_torch_trains(small: Path, tmp_path: Path) -> None:
    """AdamW at a constant rate, the head fixed, no dropout, only the blocks trained; merged by plain means."""
    settings = changed(tasks=["movies", "movies"], epochs=1)
    found = ran(settings, tmp_path / "run")
    task = text_transfer._tasks(settings)["movies"]
    encoder = Encoder.load(small)
    head = text_transfer._head(encoder, small, task, tmp_path / "other")
    experts = []
    for number in range(2):
        encoder = Encoder.load(small)
        encoder.model.requires_grad_(False)
        encoder.model.encoder.requires_grad_(True)
        trained = dict(encoder.model.encoder.named_parameters())
        optimizer = torch.optim.AdamW(trained.values(), settings.lr, weight_decay=0.0)
        order = np.random.default_rng([settings.seed, number, 0]).permutation(settings.examples)
        for places in order.reshape(-1, settings.batch):
            tokens = encoder.tokenize([task.train.texts[place] for place in places], 12)
            logits = head.logits(encoder.embed(tokens))
            labels = torch.tensor([task.train.labels[place] for place in places])
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(logits, labels).backward()
            optimizer.step()
        experts.append(torch.cat([value.detach().double().flatten() for value in trained.values()]))
    apart = (experts[0] - experts[1]).norm() / experts[0].norm()
    assert found["distance"] == pytest.approx(float(apart), rel=1e-3)


def test_only_the_last_blocks_move(small: Path, tmp_path: Path) -> None:
    ran(changed(layers=1), tmp_path / "run")
    before = Encoder.load(small).model.state_dict()
    kept = torch.load(tmp_path / "run" / "expert-1.pt", weights_only=True)["network"]
    moved = {name for name in before if not torch.equal(before[name], kept[f"model.{name}"])}
    assert moved
    assert all(name.startswith("encoder.layer.1.") for name in moved)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("seconds", "lost"), [(30.0, 3), (-1.0, 0)])
def test_killed_amid_the_second_expert_it_goes_on_to_the_same_end(
    seconds: float, lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first expert, which is done, or from the last step where each is kept."""
    monkeypatch.setattr(training, "_SECONDS", seconds)
    whole = ran(SMALL, tmp_path / "whole")
    each = SMALL.epochs * SMALL.examples // SMALL.batch
    killed_at = each + 3
    done = 0
    inner = torch.optim.AdamW.step

    class Killed(BaseException):
        pass

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal done
        if done == killed_at:
            done = 0
            raise Killed
        done += 1
        return inner(*args, **more)

    monkeypatch.setattr(torch.optim.AdamW, "step", counted)
    with pytest.raises(Killed):
        ran(SMALL, tmp_path / "killed")
    assert ran(SMALL, tmp_path / "killed") == whole
    assert done == 2 * each - killed_at + lost


@pytest.mark.usefixtures("small")
def test_heads_are_fitted_once_for_all_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(SMALL, tmp_path / "one")

    def never(*_: Any) -> None:
        raise AssertionError("fitted again")

    monkeypatch.setattr(text_transfer, "fit_head", never)
    ran(changed(lr=1e-4), tmp_path / "two")
    with pytest.raises(AssertionError, match="fitted again"):
        ran(changed(examples=40), tmp_path / "three")


@pytest.mark.parametrize("lr", [1e3, 1e30])
@pytest.mark.usefixtures("small")
def test_a_rate_that_is_far_too_high_diverges(lr: float, tmp_path: Path) -> None:
    with pytest.raises(Diverged):
        ran(changed(lr=lr), tmp_path / "run")


@pytest.mark.usefixtures("small")
def test_more_blocks_than_there_are_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IsthmusError, match="has 2 blocks, not 3"):
        ran(changed(layers=3), tmp_path / "run")


@pytest.mark.usefixtures("small")
def test_more_texts_than_there_are_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IsthmusError, match="distinct texts"):
        ran(changed(examples=1000), tmp_path / "run")


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tasks": ["movies"]}, "at least 2"),
        ({"tasks": ["movies", "novels"]}, "tasks.1"),
        ({"batch": 64, "examples": 32}, "a batch of 64 is more than the 32 examples"),
        ({"lr": 0}, "greater than 0"),
        ({"layers": 0}, "greater than or equal to 1"),
        ({"momentum": 0.9}, "momentum"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        TextTransferSettings(**wrong)


def test_merges_are_the_formulas_and_validation_chooses() -> None:
    draw = torch.Generator().manual_seed(0)
    base, *experts = ({"w": torch.randn(6, 5, generator=draw)} for _ in range(4))
    seen: list[torch.Tensor] = []

    def validate(merged: Any) -> float:
        seen.append(merged["w"].double())
        return float(merged["w"][0, 0])

    tested: list[torch.Tensor] = []

    def test(merged: Any) -> float:
        tested.append(merged["w"].double())
        return 0.75

    found = merge_figures(base, experts, 0.5, validate=validate, test=test)
    vectors = torch.stack([(each["w"] - base["w"]).double() for each in experts])
    start = base["w"].double()
    torch.testing.assert_close(tested[0], start + vectors.mean(0), atol=1e-6, rtol=0)
    for scale, merged in zip(LAMBDAS, seen, strict=False):
        torch.testing.assert_close(merged, start + scale * vectors.sum(0), atol=1e-5, rtol=0)
    assert len(seen) == len(LAMBDAS) + len(TIES)
    best = max(seen[: len(LAMBDAS)], key=lambda merged: float(merged[0, 0]))
    assert torch.equal(tested[1], best)
    best = max(seen[len(LAMBDAS) :], key=lambda merged: float(merged[0, 0]))
    assert torch.equal(tested[2], best)
    assert all(found[f"{method}_gain"] == 0.25 for method in METHODS)
    flat = vectors.flatten(1)
    unit = flat / flat.norm(dim=1, keepdim=True)
    cosines = (unit @ unit.T)[[0, 0, 1], [1, 2, 2]]
    assert found["cosine"] == pytest.approx(float(cosines.mean()))


def test_the_example_is_the_grid_of_the_command() -> None:
    experiment = experiment_of("noise-text-transfer")
    listed = planned(read_sweep(ROOT / "examples/sweeps/noise-text.yaml"), experiment)
    grid = planned(noise_grid("text").sweep, experiment)
    assert {run.name for run in listed} == {run.name for run in grid}


def test_tables_take_settings_without_momentum() -> None:
    """Made-up gains of 2 and 4 points, at two rates and two seeds."""
    runs = tuple({"lr": lr, "seed": seed} for lr in (1e-5, 1e-4) for seed in (0, 1))
    records = [
        RunRecord(
            str(number),
            TextTransferSettings(**run).model_dump(mode="json"),
            "done",
            {"accuracy": 0.75, "ties_gain": 0.02 + 0.02 * run["seed"], "ties_setting": "λ 1"},
            1.0,
        )
        for number, run in enumerate(runs)
    ]
    experiment = experiment_of("noise-text-transfer")
    found = point_grid(panel(PanelPlan("text, ties", runs, "ties_gain"), experiment, records))
    assert found.columns == ("noise scale", "lr", "diverged", "parents, %", "TIES")
    assert [row[:2] for row in found.rows] == [("2.5e-06", "1e-05"), ("2.5e-05", "0.0001")]
    assert {row[-2:] for row in found.rows} == {("75.00", "+3.00 ±1.41")}


@pytest.mark.slow
def test_a_sweep_finds_it_and_notes_what_diverged(tmp_path: Path) -> None:
    """MiniLM itself, on a few texts, in a process of its own."""
    base = {"examples": 16, "validation": 10, "test": 10, "tokens": 8, "batch": 4, "epochs": 2}
    records = run_sweep(
        Sweep("noise-text-transfer", tuple(base | {"lr": lr} for lr in (1e-5, 1e4))),
        tmp_path / "sweep",
        workers=1,
        cache=tmp_path,
        narrator=Narrator(Console(file=io.StringIO())),
    )
    assert [record.status for record in records] == ["done", "diverged"]
    assert 0 <= records[0].metrics["ties_accuracy"] <= 1
