"""A causal language model fine-tuned on three domains, merged by every method, judged by perplexity.

The base is SmolLM2-135M, or a small Llama that is trained here in a minute and goes through the same code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter

import torch

from isthmus.checkpoints import open_checkpoint
from isthmus.errors import IsthmusError
from isthmus.lab.cache import content_key, is_made, make_folder
from isthmus.lab.candidates import Recipe
from isthmus.lab.data.movies import load_movies
from isthmus.lab.data.news import load_news
from isthmus.lab.data.spam import load_spam
from isthmus.lab.demo import Merge
from isthmus.lab.machine import environment, let_threads_sleep, torch_threads
from isthmus.lab.progress import Narrator
from isthmus.lab.projection.bench import FixedObjective
from isthmus.lab.projection.calibration import Calibration, write_texts
from isthmus.lab.projection.contests import CONTESTS, ModelContest
from isthmus.lab.projection.language_model import LanguageModel, untrained
from isthmus.lab.projection.language_settings import (
    LanguageResults,
    LanguageRow,
    LanguageSeed,
    LanguageSettings,
)
from isthmus.lab.projection.results import Checks, read_report
from isthmus.lab.projection.smollm2 import smollm2
from isthmus.lab.projection.tables import language_grid, language_remarks, tell
from isthmus.lab.text import Corpus, unique
from isthmus.lab.tuning import Trial, tune
from isthmus.models.data import calibration_batches
from isthmus.models.store import store_moments

DOMAINS = ("films", "news", "e-mail")


@dataclass(frozen=True)
class Domain:
    """Texts of one domain; no two parts share one.

    Attributes:
        pretraining: What the base learns from.
        training: What the expert learns from; the first of them are for calibration.
        validation: What scales and densities are chosen on.
        test: What is reported on.
    """

    pretraining: tuple[str, ...]
    training: tuple[str, ...]
    validation: tuple[str, ...]
    test: tuple[str, ...]


def run_language(
    output: Path,
    *,
    merge: Merge,
    cache: Path = Path(".cache"),
    settings: LanguageSettings | None = None,
    contests: Sequence[ModelContest] = CONTESTS,
    narrator: Narrator | None = None,
) -> LanguageResults:
    """Train a base and its experts, merge them by every method, save what came out.

    Writes ``results.json`` into the output folder. Models and moments are kept in the cache.

    Args:
        output: Folder to write to; made if it is missing.
        merge: Merges a recipe into a folder: `isthmus.merge`, which lies on a floor above.
        cache: Where ``make data`` put its data, and where models are kept.
        settings: Sizes, rates and seeds.
        contests: The merges to compare.
        narrator: Shows the progress; on standard output by default.

    Raises:
        IsthmusError: A data package is missing, ``make data`` was not run, or a merge fails.
    """
    settings = LanguageSettings() if settings is None else settings
    narrator = Narrator() if narrator is None else narrator
    output.mkdir(parents=True, exist_ok=True)
    let_threads_sleep()
    with narrator.stage("Reading texts"):
        corpora = dict(
            zip(
                DOMAINS,
                (load_movies("imdb"), load_news(), load_spam(cache / "data")),
                strict=True,
            )
        )
    kept = cache / "lab-projection" / "language"
    with torch_threads(settings.threads):
        if settings.base == "smollm2":
            base, kept = smollm2(kept, narrator), kept / "of-smollm2"
        else:
            base = _base(corpora, settings, kept, narrator)
        opened = LanguageModel.load(base, settings.length)
        seeds: list[LanguageSeed] = []
        for seed in settings.seeds:
            domains = {name: draw(corpus, settings, seed) for name, corpus in corpora.items()}
            run = _Seed(base, opened, domains, settings, seed, kept / f"seed-{seed}", narrator)
            seeds.append(run.results(contests, merge))
            results = LanguageResults(
                settings=settings,
                parameters=opened.model.num_parameters(),
                domains=DOMAINS,
                seeds=tuple(seeds),
                stages=tuple(narrator.stages),
                environment=environment(settings.threads),
            )
            results.write(output / "results.json")
    tell([language_grid(results)], language_remarks(results), narrator)
    return results


def draw(corpus: Corpus, settings: LanguageSettings, seed: int) -> Domain:
    """Four parts of a corpus; the first is the same for every seed, as the base is.

    Raises:
        IsthmusError: The corpus is too small.
    """
    order = unique(corpus)
    random.Random(0).shuffle(order)  # noqa: S311 (a reproducible draw, not a secret)
    first, rest = order[: settings.pretraining_texts], order[settings.pretraining_texts :]
    random.Random(seed).shuffle(rest)  # noqa: S311 (as above)
    sizes = (settings.test, settings.validation, settings.training_texts)
    if sum(sizes) > len(rest):
        raise IsthmusError(
            f"The corpus {corpus.name!r} has {len(order)} distinct texts, fewer than are asked for.",
            "Lower the numbers of texts.",
        )
    test, validation, training = (
        rest[sum(sizes[:number]) : sum(sizes[: number + 1])] for number in range(3)
    )
    parts = (first, training, validation, test)
    return Domain(*(tuple(corpus.texts[index] for index in part) for part in parts))


def _base(
    corpora: Mapping[str, Corpus], settings: LanguageSettings, kept: Path, narrator: Narrator
) -> Path:
    """The folder of the base, trained now or before."""
    texts = [text for corpus in corpora.values() for text in draw(corpus, settings, 0).pretraining]
    shape = ("layers", "width", "inner", "heads", "vocabulary", "length", "threads")
    record = {
        "format": 1,
        "texts": content_key({"texts": texts}),
        "shape": {name: getattr(settings, name) for name in shape},
        "training": asdict(settings.pretraining),
        "torch": torch.__version__,
    }
    folder = kept / "base"
    if not is_made(folder, record):

        def fill(partial_folder: Path) -> None:
            with narrator.stage("Base language model", settings.pretraining.steps) as advance:
                start = untrained(texts, settings)
                start.tuned(texts, settings.pretraining, 0, advance).save(partial_folder)

        make_folder(folder, record, fill)
    return folder


class _Seed:
    """One seed's experts and their merges."""

    def __init__(
        self,
        base: Path,
        opened: LanguageModel,
        domains: Mapping[str, Domain],
        settings: LanguageSettings,
        seed: int,
        folder: Path,
        narrator: Narrator,
    ) -> None:
        self._base = base
        self._opened = opened
        self._domains = domains
        self._settings = settings
        self._seed = seed
        self._narrator = narrator
        self._experts = {name: self._expert(name, folder) for name in domains}
        self._calibrations = {}
        moments = {}
        with narrator.stage(f"Seed {seed}: calibration"):
            for name, domain in domains.items():
                place = folder / "calibration" / name
                texts = domain.training[: settings.calibration]
                data = write_texts(texts, place / "examples")
                with open_checkpoint(str(self._experts[name])) as expert:
                    batches = calibration_batches(
                        expert, data, examples=settings.calibration, tokens=settings.length
                    )
                    moments[name], _ = store_moments(expert, batches, place / "moments")
                self._calibrations[name] = Calibration(
                    data, settings.calibration, settings.length, place / "moments"
                )
            self._objective = FixedObjective(base, self._experts, moments)

    def _expert(self, name: str, kept: Path) -> Path:
        folder = kept / "experts" / name
        texts = self._domains[name].training
        record = {
            "format": 1,
            "base": content_key({"files": _made_from(self._base)}),
            "texts": content_key({"texts": texts}),
            "training": asdict(self._settings.fine_tuning),
            "seed": self._seed,
        }
        if not is_made(folder, record):

            def fill(partial_folder: Path) -> None:
                run = self._settings.fine_tuning
                with self._narrator.stage(f"Expert of {name}", run.steps) as advance:
                    self._opened.tuned(texts, run, self._seed, advance).save(partial_folder)

            make_folder(folder, record, fill)
        return folder

    def results(self, contests: Sequence[ModelContest], merge: Merge) -> LanguageSeed:
        with self._narrator.stage(f"Seed {self._seed}: base and experts"):
            alone = {name: self._loss(folder, "test") for name, folder in self._experts.items()}
            rows = [LanguageRow("base", self._loss(self._base, "test"))]
        rows += [LanguageRow(f"{name} expert", loss) for name, loss in alone.items()]
        own = {name: alone[name][name] for name in self._experts}
        rows.append(LanguageRow("single experts", own))
        recipes: dict[str, Recipe] = {}
        checks: dict[str, Checks] = {}
        for contest in contests:
            tries = self._settings.tries if contest.scaled else 0
            with self._narrator.stage(f"Seed {self._seed}: {contest.name}", tries + 1) as advance:
                row, recipes[contest.name], found = self._hold(contest, merge, advance)
            if found is not None:
                checks[contest.name] = found
            rows.append(row)
            self._narrator.say(
                f"  perplexity {row.mean_perplexity:.2f}, captured {row.captured:.3f} "
                f"{row.setting}".rstrip()
            )
        return LanguageSeed(self._seed, tuple(rows), recipes, checks)

    def _hold(
        self, contest: ModelContest, merge: Merge, advance: Callable[[int], None]
    ) -> tuple[LanguageRow, Recipe, Checks | None]:
        recipe_of = partial(
            contest.recipe, self._base, self._experts, self._calibrations, seed=self._seed
        )
        with TemporaryDirectory(prefix="isthmus-") as scratch:
            folder = Path(scratch) / "merged"

            def score(trial: Trial) -> float:
                merge(recipe_of(trial), folder, overwrite=True)
                advance(1)
                return -fmean(self._loss(folder, "validation").values())

            best, setting = Trial(), ""
            if contest.scaled:
                tries = self._settings.tries
                best = tune(score, tries=tries, densities=contest.densities).best
                setting = str(best)
            recipe = recipe_of(best)
            start = perf_counter()
            merge(recipe, folder, overwrite=True)
            seconds = perf_counter() - start
            advance(1)
            report = read_report(folder)
            row = LanguageRow(
                contest.name,
                self._loss(folder, "test"),
                self._objective.of(folder).captured,
                seconds,
                setting,
            )
        return row, recipe, None if report is None else Checks.of(report)

    def _loss(self, folder: Path, part: str) -> dict[str, float]:
        """By domain."""
        model = LanguageModel.load(folder, self._settings.length)
        return {name: model.loss(getattr(one, part)) for name, one in self._domains.items()}


def _made_from(folder: Path) -> str:
    return (folder / "made_from.json").read_text(encoding="utf-8")
