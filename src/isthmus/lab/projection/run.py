"""Full fine-tunes of one encoder for several tasks, merged by every method.

Heads, tasks and choices are as in the adapter suite; here all layers of the experts are trained. The
calibrated methods see training examples of each task, without labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any

from isthmus.errors import IsthmusError
from isthmus.lab.demo import Merge
from isthmus.lab.evaluate import Accuracies, Row, normalise
from isthmus.lab.machine import environment, let_threads_sleep, torch_threads
from isthmus.lab.memory import Memory
from isthmus.lab.progress import Narrator
from isthmus.lab.projection.contests import CONTESTS, ModelContest
from isthmus.lab.projection.many import MANY, Variant
from isthmus.lab.projection.results import (
    Checks,
    Merged,
    MergeDetail,
    ProjectionResults,
    SeedResults,
    read_report,
)
from isthmus.lab.projection.settings import ProjectionSettings
from isthmus.lab.projection.tables import many_grid, projection_grid, remarks, tell
from isthmus.lab.tuning import Trial, tune

if TYPE_CHECKING:
    from isthmus.lab.experts import Workshop
    from isthmus.lab.text import Task


def run_projection(
    output: Path,
    *,
    merge: Merge,
    cache: Path = Path(".cache"),
    settings: ProjectionSettings | None = None,
    contests: Sequence[ModelContest] = CONTESTS,
    variants: Sequence[Variant] = MANY,
    narrator: Narrator | None = None,
) -> ProjectionResults:
    """Fine-tune experts, merge them by every method, and print and save what came out.

    Writes ``results.json`` into the output folder, after every seed. Heads, experts, moments and the
    accuracies of merges are kept in the cache: a run that was stopped goes on where it was.

    Args:
        output: Folder to write to; made if it is missing.
        merge: Merges a recipe into a folder: `isthmus.merge`, which lies on a floor above.
        cache: Where ``make data`` put its data, and where experts are kept.
        settings: Sizes, rates and seeds.
        contests: The merges to compare.
        variants: The merges of the correlation, which is made on the first seed.
        narrator: Shows the progress; on standard output by default.

    Raises:
        IsthmusError: A package with weights or text is missing, ``make data`` was not run, a merge
            fails, or there are fewer than two tasks or no seed.
    """
    settings = ProjectionSettings() if settings is None else settings
    narrator = Narrator() if narrator is None else narrator
    _check(settings)
    output.mkdir(parents=True, exist_ok=True)
    let_threads_sleep()
    with narrator.stage("Starting torch and transformers"):
        from isthmus.lab.adapters_families import FAMILIES
        from isthmus.lab.experts import Workshop, draw_tasks
    kept = cache / "lab-projection" / settings.family
    with torch_threads(settings.threads):
        family = FAMILIES[settings.family](cache / "data")
        with narrator.stage("Reading examples"):
            corpora = family.corpora(settings.sizes)
        base, encoder = family.base(cache / "lab-adapters" / settings.family, narrator)
        memory = Memory(kept / "accuracies.jsonl")
        seeds: list[SeedResults] = []
        for seed in settings.seeds:
            tasks = draw_tasks(corpora, settings.sizes, seed)
            folder = kept / f"seed-{seed}"
            workshop = Workshop(base, folder, settings.at(seed), narrator, encoder)
            run = _Seed(workshop, folder, tasks, memory, settings, seed, narrator)
            correlated = () if seeds else [v for v in variants if v.contest.suits(settings.family)]
            compared = [contest for contest in contests if contest.suits(settings.family)]
            seeds.append(run.results(compared, correlated, merge))
            results = ProjectionResults(
                settings=settings,
                classes={name: task.classes for name, task in tasks.items()},
                seeds=tuple(seeds),
                stages=tuple(narrator.stages),
                environment=environment(settings.threads),
            )
            results.write(output / "results.json")
    grids = [projection_grid(results), *([many_grid(results)] if results.many else [])]
    tell(grids, remarks(results), narrator)
    return results


class _Seed:
    """One seed's experts and their merges."""

    def __init__(
        self,
        workshop: Workshop,
        folder: Path,
        tasks: Mapping[str, Task],
        memory: Memory,
        settings: ProjectionSettings,
        seed: int,
        narrator: Narrator,
    ) -> None:
        from isthmus.lab.projection.bench import FixedObjective, ModelBench
        from isthmus.lab.projection.calibration import calibrate

        self._settings = settings
        self._seed = seed
        self._narrator = narrator
        self._tasks = tasks
        self._base = workshop.base
        self._encoder = workshop.encoder
        heads = {name: workshop.head(task) for name, task in tasks.items()}
        self._experts = {name: workshop.expert(task, heads[name]) for name, task in tasks.items()}
        self._bench = ModelBench(workshop.encoder, heads, tasks, memory, workshop.base_hash)
        self._calibrations = {}
        moments = {}
        with narrator.stage(f"Seed {seed}: calibration", len(tasks)) as advance:
            for name, task in tasks.items():
                self._calibrations[name], moments[name] = calibrate(
                    task,
                    self._experts[name],
                    workshop.encoder,
                    settings.calibration,
                    folder / "calibration" / name,
                )
                advance(1)
        with narrator.stage(f"Seed {seed}: layer-local objectives"):
            self._objective = FixedObjective(workshop.base, self._experts, moments)

    def results(
        self, contests: Sequence[ModelContest], variants: Sequence[Variant], merge: Merge
    ) -> SeedResults:
        with self._narrator.stage(f"Seed {self._seed}: base and experts"):
            validation, test = (
                {
                    name: self._bench.accuracy(folder, part, tasks=(name,))[name]
                    for name, folder in self._experts.items()
                }
                for part in ("validation", "test")
            )
            base = self._bench.accuracy(None, "test")
        rows = [
            Row("base", "base", base, normalise(base, test)),
            Row("single experts", "expert", test, normalise(test, test)),
        ]
        details: dict[str, MergeDetail] = {}
        for contest in contests:
            tries = self._settings.tries if contest.scaled else 0
            with self._narrator.stage(f"Seed {self._seed}: {contest.name}", tries + 1) as advance:
                row, details[contest.name] = self._hold(contest, merge, validation, test, advance)
                advance(1)
            rows.append(row)
            self._narrator.say(
                f"  {100 * row.mean_normalised:.1f} %, captured {details[contest.name].captured:.3f} "
                f"{row.setting}".rstrip()
            )
        many = self._many(variants, merge, validation) if variants else ()
        return SeedResults(self._seed, tuple(rows), details, many)

    def _hold(
        self,
        contest: ModelContest,
        merge: Merge,
        validation: Accuracies,
        test: Accuracies,
        advance: Callable[[int], None],
    ) -> tuple[Row, MergeDetail]:
        """Tune a contest on validation, merge with what was chosen, and test that."""
        with TemporaryDirectory(prefix="isthmus-") as scratch:
            folder = Path(scratch) / "merged"

            def score(trial: Trial) -> float:
                merge(self._recipe(contest, trial), folder, overwrite=True)
                accuracy = self._bench.accuracy(folder, "validation")
                advance(1)
                return fmean(normalise(accuracy, validation).values())

            best, scores, at_edge = Trial(), {}, False
            if contest.scaled:
                tuned = tune(score, tries=self._settings.tries, densities=contest.densities)
                best, at_edge = tuned.best, tuned.at_edge
                scores = {str(trial): value for trial, value in tuned.scores.items()}
            recipe = self._recipe(contest, best)
            start = perf_counter()
            outcome = merge(recipe, folder, overwrite=True)
            seconds = perf_counter() - start
            accuracy = self._bench.accuracy(folder, "test")
            energies = self._objective.of(folder)
            report = read_report(folder)
        row = Row(
            contest.name,
            "merged",
            accuracy,
            normalise(accuracy, test),
            seconds,
            str(best) if scores else "",
        )
        detail = MergeDetail(
            recipe=recipe,
            validation=scores,
            at_edge=at_edge,
            captured=energies.captured,
            by_layer=energies.by_layer,
            own=None if report is None else report["captured"],
            checks=None if report is None else Checks.of(report),
            notes=tuple(getattr(outcome, "notes", ())),
        )
        return row, detail

    def _many(
        self, variants: Sequence[Variant], merge: Merge, experts: Accuracies
    ) -> tuple[Merged, ...]:
        """The merges of the correlation, judged on validation: nothing is chosen among them."""
        from isthmus.lab.projection.features import FeatureDistance

        examples = {
            name: task.train.texts[: self._settings.calibration]
            for name, task in self._tasks.items()
        }
        lengths = {name: task.max_length for name, task in self._tasks.items()}
        with self._narrator.stage("Features of the experts"):
            distance = FeatureDistance(self._encoder, self._experts, examples, lengths)
        found = []
        for variant in variants:
            if self._settings.family in variant.without:
                continue
            with (
                self._narrator.stage(f"Correlation: {variant.contest.name}"),
                TemporaryDirectory(prefix="isthmus-") as scratch,
            ):
                folder = Path(scratch) / "merged"
                merge(self._recipe(variant.contest, variant.trial), folder)
                accuracy = self._bench.accuracy(folder, "validation")
                energies = self._objective.of(folder)
                merged = Merged(
                    variant.contest.name,
                    variant.group,
                    energies.captured,
                    fmean(energies.by_layer.values()),
                    distance.captured(self._encoder.reopened(folder)),
                    accuracy,
                    fmean(normalise(accuracy, experts).values()),
                )
            found.append(merged)
            self._narrator.say(
                f"  {100 * merged.mean_normalised:.1f} %, captured {merged.captured:.3f}, "
                f"features {merged.output:.3f}"
            )
        return tuple(found)

    def _recipe(self, contest: ModelContest, trial: Trial) -> dict[str, Any]:
        return contest.recipe(self._base, self._experts, self._calibrations, trial, self._seed)


def _check(settings: ProjectionSettings) -> None:
    if len(settings.sizes) < 2:
        raise IsthmusError(
            "The experiment needs two tasks at least.", "Add a task to settings.sizes."
        )
    if not settings.seeds or len(set(settings.seeds)) < len(settings.seeds):
        raise IsthmusError(
            f"Seeds must be one or more different numbers, not {[*settings.seeds]}.",
            "Give --seeds 0,1,2, for example.",
        )
    if settings.tries < 3:
        raise IsthmusError(
            f"Every method needs three tries at least, not {settings.tries}.", "Raise the tries."
        )
