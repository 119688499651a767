from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import isthmus
from isthmus.checkpoints import open_checkpoint
from isthmus.errors import IsthmusError
from isthmus.lab.adapters_families import TextFamily
from isthmus.lab.encoders import Encoder
from isthmus.lab.experts import Workshop, draw_tasks
from isthmus.lab.images import ImageEncoder, load_image_encoder
from isthmus.lab.memory import Memory
from isthmus.lab.progress import Narrator
from isthmus.lab.projection.bench import FixedObjective, ModelBench
from isthmus.lab.projection.calibration import calibrate
from isthmus.lab.projection.contests import CONTESTS, ModelContest, projection
from isthmus.lab.projection.correlation import spearman
from isthmus.lab.projection.features import FeatureDistance
from isthmus.lab.projection.many import MANY, Variant
from isthmus.lab.projection.results import Checks
from isthmus.lab.projection.run import run_projection
from isthmus.lab.projection.settings import ProjectionSettings
from isthmus.lab.settings import FineTuning, Sizes
from isthmus.lab.text import Part, Task
from isthmus.lab.tuning import Trial
from isthmus.methods.registry import METHODS
from isthmus.models.data import calibration_batches
from isthmus.recipes import load_recipe

TASKS = ("rotten_tomatoes", "tweets")
COUNT = 12


@pytest.fixture
def narrator():
    return Narrator(Console(file=io.StringIO(), width=120))


@pytest.fixture(scope="module")
def settings():
    sizes = Sizes(train=24, validation=6, test=10, max_length=12)
    return ProjectionSettings(
        seeds=(0, 1),
        sizes=dict.fromkeys(TASKS, sizes),
        fine_tuning=FineTuning(batch_size=8, learning_rate=3e-3),
        calibration=COUNT,
        tries=3,
        threads=1,
    )


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    return TextFamily(tmp_path_factory.mktemp("none")).corpora(TASKS)


@pytest.fixture(scope="module")
def made(tmp_path_factory, corpora, settings, small_encoder):
    """Tasks, experts, and what they are calibrated on."""
    tmp_path = tmp_path_factory.mktemp("made")
    narrator = Narrator(Console(file=io.StringIO()))
    tasks = draw_tasks(corpora, settings.sizes, 0)
    workshop = Workshop(small_encoder, tmp_path / "cache", settings.at(0), narrator)
    heads = {name: workshop.head(task) for name, task in tasks.items()}
    experts = {name: workshop.expert(task, heads[name]) for name, task in tasks.items()}
    calibrated = {
        name: calibrate(task, experts[name], workshop.encoder, COUNT, tmp_path / name)
        for name, task in tasks.items()
    }
    return workshop, heads, tasks, experts, calibrated


def test_calibration_reads_texts_as_training_does(made):
    workshop, _, tasks, experts, calibrated = made
    for name, task in tasks.items():
        entry = calibrated[name][0].entry(stored=False)
        with open_checkpoint(str(experts[name])) as expert:
            batches = calibration_batches(
                expert, calibrated[name][0].data, examples=entry["examples"], tokens=entry["tokens"]
            )
        read = [
            ids[mask.bool()].tolist()
            for batch in batches
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        trained = workshop.encoder.tokenize(task.train.texts[:COUNT], task.max_length)
        assert sorted(read) == sorted(trained)
        assert max(map(len, read)) <= task.max_length


class Pixels:
    """Stands for `Pictures`: names are numbers of pictures."""

    def __init__(self):
        self.all = torch.randint(0, 256, (COUNT, 784), generator=torch.Generator().manual_seed(0))
        self.all[0, :256] = torch.arange(256)

    def pixels(self, name):
        return self.all[int(name)].tolist()


def test_calibration_reads_pictures_as_training_does(tmp_path):
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=28,
        patch_size=7,
        num_channels=1,
    )
    ImageEncoder(ViTModel(config, add_pooling_layer=False), Pixels()).save(tmp_path / "expert")
    encoder = load_image_encoder(tmp_path / "expert", Pixels())
    names = tuple(map(str, range(COUNT)))
    task = Task("t", ("a",), 1, *[Part(names, (0,) * COUNT)] * 3)
    calibrated, _ = calibrate(task, tmp_path / "expert", encoder, COUNT, tmp_path / "c")
    with open_checkpoint(str(tmp_path / "expert")) as expert:
        batches = calibration_batches(expert, calibrated.data, examples=COUNT)
    seen = []
    encoder.model.register_forward_pre_hook(
        lambda _module, _inputs, given: seen.append(given["pixel_values"]), with_kwargs=True
    )
    encoder.features(names, 1)
    read, trained = torch.cat([batch["pixel_values"] for batch in batches]), torch.cat(seen)
    order = [next(i for i, one in enumerate(read) if torch.equal(one, other)) for other in trained]
    assert sorted(order) == [*range(COUNT)]


def test_energy_is_that_of_outputs_computed_one_by_one(made, tmp_path):
    _, _, tasks, experts, calibrated = made
    base = made[0].base
    isthmus.merge(
        {
            "merge_method": "linear",
            "models": [{"model": str(f), "parameters": {"weight": 1}} for f in experts.values()],
        },
        tmp_path / "merged",
    )
    found = FixedObjective(base, experts, {n: c[1] for n, c in calibrated.items()}).of(
        tmp_path / "merged"
    )
    weights = [load_file(folder / "model.safetensors") for folder in (base, tmp_path / "merged")]
    total = torch.zeros(2, dtype=torch.float64)
    for name, task in tasks.items():
        expert = Encoder.load(experts[name])
        layers = {
            f"{n}.weight": m
            for n, m in expert.model.named_modules()
            if isinstance(m, torch.nn.Linear)
        }
        inputs = {key: [] for key in layers}
        for key, module in layers.items():
            module.register_forward_pre_hook(
                lambda _, x, heard=inputs[key]: heard.append(x[0].flatten(0, -2))
            )
        for row in expert.tokenize(task.train.texts[:COUNT], task.max_length):
            with torch.no_grad():
                expert.embed([row])
        for key, module in layers.items():
            # The pooler does not differ between the models.
            if "pooler" in key:
                continue
            x = torch.cat(inputs[key]).double()
            for place, state in enumerate(weights):
                bias = state[key.replace("weight", "bias")].double()
                y = x @ state[key].double().mT + bias
                target = x @ module.weight.detach().double().mT + module.bias.detach().double()
                total[place] += (y - target).square().sum() / len(x)
    assert found.captured == pytest.approx(1 - float(total[1] / total[0]), abs=1e-4)


def test_energy_of_base_and_of_a_lone_expert(made):
    _, _, _, experts, calibrated = made
    base = made[0].base
    one = {"tweets": experts["tweets"]}
    objective = FixedObjective(base, one, {"tweets": calibrated["tweets"][1]})
    assert objective.of(base).captured == pytest.approx(0, abs=1e-12)
    alone = objective.of(experts["tweets"])
    assert alone.captured == pytest.approx(1)
    assert min(alone.by_layer.values()) == pytest.approx(1)
    examples = {"tweets": made[2]["tweets"].train.texts[:COUNT]}
    encoder = made[0].encoder
    distance = FeatureDistance(encoder, one, examples, {"tweets": 12})
    assert distance.captured(encoder) == 0
    assert distance.captured(encoder.reopened(experts["tweets"])) == pytest.approx(1)


def test_the_bench_tells_models_apart(made, tmp_path):
    workshop, heads, tasks, experts, _ = made
    bench = ModelBench(workshop.encoder, heads, tasks, Memory(tmp_path / "m"), "hash")
    found = {name: bench.accuracy(folder, "test") for name, folder in experts.items()}
    again = ModelBench(workshop.encoder, heads, tasks, Memory(tmp_path / "m"), "hash")
    assert {name: again.accuracy(folder, "test") for name, folder in experts.items()} == found
    assert len((tmp_path / "m").read_text().splitlines()) == 2


def test_a_report_with_a_better_point_in_the_basis_is_told():
    layer = {"initial": 4.0, "value": 2.0, "heuristics": {"soup": 2.5, "TIES": 1.0}}
    good = {"layers": {"a": {**layer, "contained": ["soup"]}, "b": {"notes": []}}}
    assert Checks.of(good) == Checks(1, ())
    bad = {"layers": {"a": {**layer, "contained": ["soup", "TIES"]}}}
    assert Checks.of(bad) == Checks(2, ("a: TIES",))


def test_spearman_is_scipys():
    from scipy.stats import spearmanr

    first, second = [1.0, 2.0, 2.0, 5.0, -3.0], [0.1, 0.4, 0.2, 0.4, 0.3]
    assert spearman(first, second) == pytest.approx(spearmanr(first, second).statistic)
    assert spearman([1, 1, 1], [1, 2, 3]) != spearman([1, 1, 1], [1, 2, 3])  # NaN


@pytest.mark.parametrize(
    "contest",
    [*CONTESTS, *(variant.contest for variant in MANY)],
    ids=lambda contest: contest.name,
)
def test_contests_are_recipes(contest, made):
    _, _, _, experts, calibrated = made
    trial = Trial(0.5, contest.densities[0] if contest.densities else None)
    found = contest.recipe(
        made[0].base, experts, {n: c[0] for n, c in calibrated.items()}, trial, 3
    )
    recipe = load_recipe(found)  # refuses unknown methods, keys and parameters
    method = METHODS[contest.method]
    assert ("calibration" in found["models"][0]) is getattr(method, "calibrated", False)
    assert len(recipe.experts) == len(TASKS)


def test_columns_of_text_are_left_out():
    left = {contest.name for contest in CONTESTS if not contest.suits("text")}
    assert left == {"projection columns", "projection columns seq."}
    assert all(contest.suits("vision") for contest in CONTESTS)


def test_names_of_merges_are_unique():
    for contests in (CONTESTS, [variant.contest for variant in MANY]):
        assert len({contest.name for contest in contests}) == len(contests)
    assert len(MANY) >= 30


SOME = (
    ModelContest("task_arithmetic", "task_arithmetic", scaled=True),
    projection("projection scalar", sequential=False, basis="scalar"),
    projection("projection diagonal seq.", sequential=True, basis="diagonal"),
)


def test_a_run_from_end_to_end_and_again(
    tmp_path, settings, narrator, small_encoder, corpora, monkeypatch
):
    monkeypatch.setattr("isthmus.lab.adapters_families.minilm", lambda: small_encoder)
    monkeypatch.setattr(TextFamily, "corpora", lambda *_: corpora)
    variants = tuple(
        Variant("a", ModelContest(f"λ={scale}", "task_arithmetic", scaled=True), Trial(scale))
        for scale in (0.0, 0.5)
    )
    options = {"merge": isthmus.merge, "cache": tmp_path / "cache", "settings": settings}
    options |= {"contests": SOME, "variants": variants}
    first = run_projection(tmp_path / "out", narrator=narrator, **options)
    assert [row.name for row in first.rows] == ["base", "single experts", *(c.name for c in SOME)]
    for seed in first.seeds:
        details = seed.details
        assert len(details["task_arithmetic"].validation) == settings.tries
        assert details["task_arithmetic"].own is None
        local = details["projection scalar"]
        assert local.validation == {}
        # The objective of a layer-local merge is the one that all are judged by.
        assert local.captured == pytest.approx(local.own, abs=1e-4)
        assert local.captured >= details["task_arithmetic"].captured - 1e-6
    assert first.checks.compared > 0
    assert first.checks.violations == ()
    (nothing, half), later = first.many, first.seeds[1].many
    assert later == ()
    assert nothing.captured == pytest.approx(0, abs=1e-6)
    assert nothing.output == pytest.approx(0, abs=1e-6)
    assert half.captured > 0
    told = narrator.console.file.getvalue()
    assert "comparisons" in told
    assert "Spearman" in told
    saved = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["name"] for row in saved["mean_over_seeds"]] == [row.name for row in first.rows]
    assert saved["checks"]["violations"] == []

    monkeypatch.setattr("isthmus.lab.bench.evaluate", None)
    monkeypatch.setattr("isthmus.lab.experts.fine_tune", None)
    again = run_projection(tmp_path / "out", **options)
    assert [row.accuracy for row in again.rows] == [row.accuracy for row in first.rows]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"sizes": {"news": Sizes(1, 1, 1, 1)}}, "two tasks"),
        ({"seeds": ()}, "Seeds must be"),
        ({"tries": 2}, "three tries"),
    ],
)
def test_settings_that_compare_nothing_are_refused(tmp_path, settings, change, problem):
    with pytest.raises(IsthmusError, match=problem):
        run_projection(tmp_path, merge=isthmus.merge, settings=replace(settings, **change))


def test_experts_differ_in_layers_alone(made):
    base = load_file(made[0].base / "model.safetensors")
    for folder in made[3].values():
        expert = load_file(folder / "model.safetensors")
        moved = {name for name in base if not torch.equal(base[name], expert[name])}
        assert moved
        assert all(name.startswith("encoder.layer.") for name in moved)
