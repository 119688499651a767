from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

import isthmus
from isthmus.errors import IsthmusError
from isthmus.lab.adapters import run_adapters
from isthmus.lab.adapters_bench import AdapterBench, adapter_rank
from isthmus.lab.adapters_contests import CONTESTS, DENSITIES, AdapterContest
from isthmus.lab.adapters_distance import Likeness
from isthmus.lab.adapters_families import TextFamily
from isthmus.lab.adapters_results import AdapterResults, MergeDetail, SeedResults
from isthmus.lab.adapters_settings import ADAPTER_SIZES, AdapterSettings, Lora
from isthmus.lab.adapters_tables import adapters_remarks, adapters_table
from isthmus.lab.adapters_training import AdapterWorkshop
from isthmus.lab.evaluate import Row, normalise
from isthmus.lab.experts import draw_tasks
from isthmus.lab.memory import Memory
from isthmus.lab.progress import Narrator
from isthmus.lab.settings import FineTuning, Sizes
from isthmus.lab.tuning import Trial
from isthmus.methods.registry import METHODS

TASKS = ("rotten_tomatoes", "tweets")
SOME = tuple(contest for contest in CONTESTS if contest.name in ("linear", "ties"))


@pytest.fixture
def settings():
    sizes = Sizes(train=24, validation=6, test=10, max_length=12)
    return AdapterSettings(
        seeds=(0, 1),
        sizes=dict.fromkeys(TASKS, sizes),
        lora=Lora(rank=2, alpha=4),
        fine_tuning=FineTuning(batch_size=8, learning_rate=1e-2),
        tries=3,
        threads=1,
    )


@pytest.fixture
def narrator():
    return Narrator(Console(file=io.StringIO(), width=120))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return TextFamily(tmp_path_factory.mktemp("none")).corpora(TASKS)


@pytest.fixture
def made(tmp_path, corpora, settings, narrator, small_encoder):
    """A workshop, its tasks, heads and adapters."""
    tasks = draw_tasks(corpora, settings.sizes, 0)
    workshop = AdapterWorkshop(small_encoder, tmp_path / "cache", settings, 0, narrator)
    heads = {name: workshop.head(task) for name, task in tasks.items()}
    adapters = {name: workshop.adapter(task, heads[name]) for name, task in tasks.items()}
    return SimpleNamespace(workshop=workshop, tasks=tasks, heads=heads, adapters=adapters)


def first_adapter(recipe, out):
    """A stand-in for `isthmus.merge`: whatever the method, the first adapter."""
    shutil.copytree(recipe["models"][0]["model"], out)
    return SimpleNamespace(notes=("a note",))


def tensors(folder):
    return load_file(folder / "adapter_model.safetensors")


def test_every_method_that_takes_adapters_has_a_line():
    able = {
        name
        for name, method in METHODS.items()
        # Methods that look at data have a suite of their own.
        if method.spaces and method.max_experts is None and not method.calibrated
    }
    assert able <= {contest.method for contest in CONTESTS}
    for contest in CONTESTS:
        method = METHODS[contest.method]
        assert contest.space is None or contest.space in method.spaces
        known = {parameter.name for parameter in method.parameters}
        assert ("lambda" in known) is contest.scaled
        # task_arithmetic accepts one for others' recipes, without effect.
        dense = [parameter for parameter in method.parameters if parameter.name == "density"]
        assert contest.densities == (DENSITIES if dense and not dense[0].ignored else ())
    assert len({contest.name for contest in CONTESTS}) == len(CONTESTS)


def test_a_trial_becomes_a_recipe():
    contest = AdapterContest("x", "ties", "knots", wide=True, densities=DENSITIES)
    recipe = contest.recipe([Path("a"), Path("b")], Trial(2.0, 0.2), rank=4, seed=3)
    assert recipe == {
        "name": "x of 2 adapters",
        "merge_method": "ties",
        "space": "knots",
        "rank": 8,
        "seed": 3,
        "parameters": {"lambda": 2.0},
        "models": [
            {"model": name, "parameters": {"weight": 1.0, "density": 0.2}} for name in ("a", "b")
        ],
    }


def test_training_changes_both_factors_of_every_adapted_module(made, settings):
    for folder in made.adapters.values():
        stored = tensors(folder)
        # Query, key, value and three dense maps in two layers; two factors each.
        assert len(stored) == 24
        assert all(value.abs().max() > 0 for value in stored.values())
        assert adapter_rank(folder) == settings.lora.rank


def test_adapters_are_made_once_and_the_same_again(
    made, tmp_path, settings, narrator, small_encoder
):
    folder = made.adapters["tweets"]
    file = folder / "adapter_model.safetensors"
    before, bytes_before = file.stat().st_mtime_ns, file.read_bytes()
    assert made.workshop.adapter(made.tasks["tweets"], made.heads["tweets"]) == folder
    assert file.stat().st_mtime_ns == before
    afresh = AdapterWorkshop(small_encoder, tmp_path / "other", settings, 0, narrator)
    torch.rand(1)  # Chance outside must not matter.
    again = afresh.adapter(made.tasks["tweets"], made.heads["tweets"])
    assert (again / "adapter_model.safetensors").read_bytes() == bytes_before
    other_seed = AdapterWorkshop(small_encoder, tmp_path / "third", settings, 1, narrator)
    other = other_seed.adapter(made.tasks["tweets"], made.heads["tweets"])
    assert (other / "adapter_model.safetensors").read_bytes() != bytes_before


def test_the_bench_adds_the_update_that_the_factors_say(made, tmp_path):
    bench = AdapterBench(
        made.workshop.encoder, made.heads, made.tasks, Memory(tmp_path / "m"), "hash"
    )
    folder = made.adapters["tweets"]
    stored = tensors(folder)
    name = "encoder.layer.0.attention.self.query"
    a, b = (stored[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
    base = made.workshop.encoder.model.get_submodule(name).weight.detach().clone()
    for scale in (1.0, -0.5):
        merged = bench._adapted(folder, scale).model.get_submodule(name).weight
        # alpha / r is 2.
        torch.testing.assert_close(merged, base + 2 * scale * (b @ a))
    assert torch.equal(made.workshop.encoder.model.get_submodule(name).weight, base)


def test_what_was_judged_is_remembered_by_its_bytes(made, tmp_path, monkeypatch):
    path = tmp_path / "memory.jsonl"

    def bench():
        return AdapterBench(made.workshop.encoder, made.heads, made.tasks, Memory(path), "hash")

    first = bench()
    found = first.accuracy(made.adapters["tweets"], "validation")
    assert found.keys() == set(TASKS)
    with path.open("ab") as file:
        file.write(b'{"key": "half')  # A run was killed here.
    more = bench().accuracy(made.adapters["tweets"], "test")
    monkeypatch.setattr("isthmus.lab.bench.evaluate", None)
    copied = tmp_path / "copied"
    shutil.copytree(made.adapters["tweets"], copied)
    again = bench()
    assert again.accuracy(copied, "validation") == found
    assert again.accuracy(copied, "test") == more
    stored = tensors(copied)
    save_file(
        {key: 2 * value for key, value in stored.items()}, copied / "adapter_model.safetensors"
    )
    with pytest.raises(TypeError):
        again.accuracy(copied, "test")


def test_a_run_from_end_to_end_and_again(
    tmp_path, settings, narrator, small_encoder, corpora, monkeypatch
):
    monkeypatch.setattr("isthmus.lab.adapters_families.minilm", lambda: small_encoder)
    monkeypatch.setattr(TextFamily, "corpora", lambda *_: corpora)
    cache, out = tmp_path / "cache", tmp_path / "out"
    options = {"merge": first_adapter, "cache": cache, "settings": settings, "contests": SOME}
    first = run_adapters(out, narrator=narrator, **options)
    assert [row.name for row in first.rows] == ["base", "single adapters", *(c.name for c in SOME)]
    for seed in first.seeds:
        rows = {row.name: row for row in seed.rows}
        assert rows["single adapters"].mean_normalised == 1
        assert rows["ties"].normalised[TASKS[0]] == 1  # The merge is that task's adapter.
        assert seed.details["linear"].validation == {}
        assert len(seed.details["ties"].validation) == settings.tries
        assert seed.details["ties"].notes == ("a note",)
        assert seed.details["ties"].rank == settings.lora.rank
    told = narrator.console.file.getvalue()
    assert "ties, seed 0: a note" in told
    saved = json.loads((out / "results.json").read_text())
    assert [seed["seed"] for seed in saved["seeds"]] == [0, 1]
    assert [row["name"] for row in saved["mean_over_seeds"]] == [row.name for row in first.rows]
    assert sorted(path.name for path in (cache / "lab-adapters" / "text").iterdir()) == [
        "accuracies.jsonl",
        "seed-0",
        "seed-1",
    ]

    monkeypatch.setattr("isthmus.lab.bench.evaluate", None)
    monkeypatch.setattr("isthmus.lab.adapters_training.descend", None)
    again = run_adapters(out, **options)
    assert [row.accuracy for row in again.rows] == [row.accuracy for row in first.rows]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sizes": {"news": ADAPTER_SIZES["news"]}}, "two tasks"),
        ({"seeds": ()}, "Seeds must be"),
        ({"seeds": (1, 1)}, "Seeds must be"),
        ({"tries": 2}, "three tries"),
    ],
)
def test_settings_that_compare_nothing_are_refused(tmp_path, settings, change, problem):
    with pytest.raises(IsthmusError, match=problem):
        run_adapters(tmp_path, merge=first_adapter, settings=replace(settings, **change))


def some_results(task="tweets"):
    sizes = Sizes(train=100, validation=100, test=1000, max_length=10)

    def row(name, kind, value, seconds=None, setting=""):
        accuracy = {"movies": value, task: value}
        return Row(
            name, kind, accuracy, normalise(accuracy, {"movies": 0.8, task: 0.8}), seconds, setting
        )

    def detail(at_edge):
        return MergeDetail(
            16, {"merge_method": "ties", "note": task}, {"λ=1": 0.9}, at_edge, (task,)
        )

    return AdapterResults(
        settings=AdapterSettings(sizes={"movies": sizes, task: sizes}),
        classes={"movies": ("bad & ugly", "good"), task: ("bad", "good")},
        seeds=tuple(
            SeedResults(
                seed,
                (
                    row("base", "base", 0.6),
                    row("single adapters", "expert", 0.8),
                    row("ties", "merged", 0.7 + 0.04 * seed, 1.5, "λ=1"),
                ),
                {"ties": detail(seed == 0)},
                Likeness(8.25, 0.125, 0.02),
            )
            for seed in (0, 1)
        ),
        stages=(),
        environment={"torch": "2"},
    )


def test_means_are_over_seeds_and_spread_is_theirs():
    results = some_results()
    rows = {row.name: row for row in results.rows}
    assert rows["ties"].mean_normalised == pytest.approx((0.7 + 0.74) / 2 / 0.8)
    assert results.spread("ties") == pytest.approx(0.05 / 2**0.5)
    assert results.spread("base") == 0
    assert replace(results, seeds=results.seeds[:1]).spread("ties") is None
    assert [results.rank(name) for name in rows] == [None, 16, 16]


def test_the_table_and_its_lines():
    console = Console(file=io.StringIO(), width=80)
    console.print(adapters_table(some_results()))
    lines = console.file.getvalue().splitlines()
    assert any(line.split()[-4:] == ["72.0", "90.0", "3.5", "1.5"] for line in lines), lines
    told = [*adapters_remarks(some_results())]
    assert "±1.0 points at 75 % with 2,000 test examples" in told[0]
    assert "overlap by 12 %, the cosine of two updates is 0.02" in told[2]
    assert "effective rank is 8.2 of 16" in told[2]
    assert told[3].startswith("ties: in 1 of 2 seeds")
    assert told[4:] == ["ties, seed 0: tweets"]


def test_six_tasks_and_three_seeds_fit_a_terminal():
    accuracy = dict.fromkeys(ADAPTER_SIZES, 0.754)
    shares = dict.fromkeys(ADAPTER_SIZES, 1.0)
    names = ("task_arithmetic", "geomerge projection")
    detail = MergeDetail(16, {}, {}, False, ())
    seed = SeedResults(
        0,
        tuple(Row(name, "merged", accuracy, shares, 120.8) for name in names),
        dict.fromkeys(names, detail),
        Likeness(8.0, 0.1, 0.0),
    )
    results = replace(
        some_results(), classes=dict.fromkeys(ADAPTER_SIZES, ("a", "b")), seeds=(seed,) * 3
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(adapters_table(results))
    told = console.file.getvalue()
    rows = [line.split()[-9:] for line in told.splitlines() if "120.8" in line]
    assert rows == [["75.4"] * 6 + ["100.0", "0.0", "120.8"]] * 2
    assert "task_arithmetic" in told
    assert "…" not in told


def test_the_real_merge_scales_as_the_trials_assume(made, tmp_path):
    """All scales share one merge at scale 1; the recipe's own scale must do the same."""
    for contest in CONTESTS:
        if not contest.scaled:
            continue
        density = 0.5 if contest.densities else None
        one, two = tmp_path / f"{contest.name} 1", tmp_path / f"{contest.name} 2"
        for scale, out in ((1.0, one), (2.0, two)):
            recipe = contest.recipe(
                [*made.adapters.values()], Trial(scale, density), rank=2, seed=0
            )
            isthmus.merge(recipe, out)
        bench = AdapterBench(
            made.workshop.encoder, made.heads, made.tasks, Memory(tmp_path / "m"), ""
        )
        name = "encoder.layer.1.output.dense"
        expected = bench._adapted(one, 2.0).model.get_submodule(name).weight
        got = bench._adapted(two, 1.0).model.get_submodule(name).weight
        torch.testing.assert_close(got, expected, msg=contest.name)
