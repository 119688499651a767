"""The adapter suite: LoRA adapters of one encoder for several tasks, merged by every method.

The design, and why its comparisons are fair:

1. Per task, a linear head is fitted on features of the frozen base encoder, and a LoRA adapter is
   trained under that head, which stays fixed. Heads are not merged.
2. Adapters are merged by every method through `isthmus.merge`, adapter folders in, adapter folder
   out. PEFT loads the result onto the base. Each merge is judged on every task.
3. Scale and density are chosen on validation examples, by one procedure with one number of tries
   for every method. The tested merge is then made afresh by its own recipe, and judged once on
   test examples, which none of these choices saw.
4. All of it once for every seed, with other draws of examples, other starts and other orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING

from isthmus.errors import IsthmusError
from isthmus.lab.adapters_contests import CONTESTS, AdapterContest
from isthmus.lab.adapters_results import AdapterResults, MergeDetail, SeedResults
from isthmus.lab.adapters_settings import AdapterSettings
from isthmus.lab.adapters_tables import tell
from isthmus.lab.demo import Merge
from isthmus.lab.evaluate import Accuracies, Row, normalise
from isthmus.lab.machine import environment, let_threads_sleep, torch_threads
from isthmus.lab.memory import Memory
from isthmus.lab.progress import Narrator
from isthmus.lab.tuning import Trial, tune

if TYPE_CHECKING:
    from isthmus.lab.adapters_training import AdapterWorkshop
    from isthmus.lab.text import Task


def run_adapters(
    output: Path,
    *,
    merge: Merge,
    cache: Path = Path(".cache"),
    settings: AdapterSettings | None = None,
    contests: Sequence[AdapterContest] = CONTESTS,
    narrator: Narrator | None = None,
) -> AdapterResults:
    """Train adapters, merge them by every method, and print and save what came out.

    Writes ``results.json`` into the output folder, after every seed. Heads, adapters and the
    accuracies of merges are kept in the cache: a run that was stopped goes on where it was, and a
    second run trains and judges nothing, but merges afresh.

    Args:
        output: Folder to write to; made if it is missing.
        merge: Merges a recipe into a folder: `isthmus.merge`, which lies on a floor above.
        cache: Where ``make data`` put its data, and where adapters are kept.
        settings: Sizes, rates and seeds.
        contests: The merges to compare.
        narrator: Shows the progress; on standard output by default.

    Raises:
        IsthmusError: A package with weights or text is missing, ``make data`` was not run, a merge
            fails, or there are fewer than two tasks or no seed.
    """
    settings = AdapterSettings() if settings is None else settings
    narrator = Narrator() if narrator is None else narrator
    _check(settings)
    output.mkdir(parents=True, exist_ok=True)
    let_threads_sleep()
    with narrator.stage("Starting torch, transformers and PEFT"):
        from isthmus.lab.adapters_families import FAMILIES
        from isthmus.lab.adapters_training import AdapterWorkshop
        from isthmus.lab.experts import draw_tasks
    kept = cache / "lab-adapters" / settings.family
    with torch_threads(settings.threads):
        family = FAMILIES[settings.family](cache / "data")
        with narrator.stage("Reading examples"):
            corpora = family.corpora(settings.sizes)
        base, encoder = family.base(kept, narrator)
        memory = Memory(kept / "accuracies.jsonl")
        seeds: list[SeedResults] = []
        for seed in settings.seeds:
            tasks = draw_tasks(corpora, settings.sizes, seed)
            workshop = AdapterWorkshop(
                base, kept / f"seed-{seed}", settings, seed, narrator, encoder
            )
            run = _Seed(workshop, tasks, memory, settings, seed, narrator)
            seeds.append(run.results(contests, merge))
            results = AdapterResults(
                settings=settings,
                classes={name: corpus.classes for name, corpus in corpora.items()},
                seeds=tuple(seeds),
                stages=tuple(narrator.stages),
                environment=environment(settings.threads),
            )
            results.write(output / "results.json")
    tell(results, narrator)
    return results


class _Seed:
    """One seed's adapters and their merges."""

    def __init__(
        self,
        workshop: AdapterWorkshop,
        tasks: Mapping[str, Task],
        memory: Memory,
        settings: AdapterSettings,
        seed: int,
        narrator: Narrator,
    ) -> None:
        from isthmus.lab.adapters_bench import AdapterBench

        self._settings = settings
        self._seed = seed
        self._narrator = narrator
        heads = {name: workshop.head(task) for name, task in tasks.items()}
        self._adapters = {name: workshop.adapter(task, heads[name]) for name, task in tasks.items()}
        self._bench = AdapterBench(workshop.encoder, heads, tasks, memory, workshop.base_hash)

    def results(self, contests: Sequence[AdapterContest], merge: Merge) -> SeedResults:
        from isthmus.lab.adapters_distance import likeness

        with self._narrator.stage(f"Seed {self._seed}: base and single adapters"):
            validation, test = (
                {
                    name: self._bench.accuracy(folder, part, tasks=(name,))[name]
                    for name, folder in self._adapters.items()
                }
                for part in ("validation", "test")
            )
            base = self._bench.accuracy(None, "test")
        rows = [
            Row("base", "base", base, normalise(base, test)),
            Row("single adapters", "expert", test, normalise(test, test)),
        ]
        details: dict[str, MergeDetail] = {}
        for contest in contests:
            tries = self._settings.tries if contest.scaled else 0
            with self._narrator.stage(f"Seed {self._seed}: {contest.name}", tries + 1) as advance:
                row, details[contest.name] = self._hold(contest, merge, validation, test, advance)
                advance(1)
            rows.append(row)
            self._narrator.say(f"  {100 * row.mean_normalised:.1f} % {row.setting}".rstrip())
        return SeedResults(self._seed, tuple(rows), details, likeness([*self._adapters.values()]))

    def _hold(
        self,
        contest: AdapterContest,
        merge: Merge,
        validation: Accuracies,
        test: Accuracies,
        advance: Callable[[int], None],
    ) -> tuple[Row, MergeDetail]:
        """Tune a contest on validation, merge with what was chosen, and test that."""
        from isthmus.lab.adapters_bench import adapter_rank

        with TemporaryDirectory(prefix="isthmus-") as scratch:
            at_one: dict[float | None, Path] = {}

            def score(trial: Trial) -> float:
                # The scale multiplies the result and nothing else: all scales share one merge.
                if trial.density not in at_one:
                    folder = Path(scratch) / f"density-{trial.density}"
                    merge(self._recipe(contest, Trial(1.0, trial.density)), folder)
                    at_one[trial.density] = folder
                accuracy = self._bench.accuracy(
                    at_one[trial.density], "validation", scale=trial.scale
                )
                advance(1)
                return fmean(normalise(accuracy, validation).values())

            best, scores, at_edge = Trial(), {}, False
            if contest.scaled:
                tuned = tune(score, tries=self._settings.tries, densities=contest.densities)
                best, at_edge = tuned.best, tuned.at_edge
                scores = {str(trial): value for trial, value in tuned.scores.items()}
            recipe = self._recipe(contest, best)
            chosen = Path(scratch) / "chosen"
            start = perf_counter()
            outcome = merge(recipe, chosen)
            seconds = perf_counter() - start
            accuracy = self._bench.accuracy(chosen, "test")
            row = Row(
                contest.name,
                "merged",
                accuracy,
                normalise(accuracy, test),
                seconds,
                str(best) if scores else "",
            )
            notes = tuple(getattr(outcome, "notes", ()))
            return row, MergeDetail(adapter_rank(chosen), recipe, scores, at_edge, notes)

    def _recipe(self, contest: AdapterContest, trial: Trial) -> dict[str, object]:
        return contest.recipe(
            [*self._adapters.values()],
            trial,
            rank=self._settings.lora.rank,
            seed=self._seed,
        )


def _check(settings: AdapterSettings) -> None:
    if len(settings.sizes) < 2:
        raise IsthmusError("The suite needs two tasks at least.", "Add a task to settings.sizes.")
    if not settings.seeds or len(set(settings.seeds)) < len(settings.seeds):
        raise IsthmusError(
            f"Seeds must be one or more different numbers, not {[*settings.seeds]}.",
            "Give --seeds 0,1,2, for example.",
        )
    if settings.tries < 3:
        raise IsthmusError(
            f"Every method needs three tries at least, not {settings.tries}.", "Raise the tries."
        )
