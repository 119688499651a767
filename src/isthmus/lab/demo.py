"""The demo: three real experts, merged by every method, judged on real text.

The design, and why its comparisons are fair:

1. Per task, a linear head is fitted on features of the frozen base encoder. That is the **base**
   row: what the pretrained encoder knows, given the same labelled examples as the expert.
2. Per task, a copy of the base is fine-tuned under that head, which stays fixed. These are the
   **experts**.
3. Experts are merged by every method. Each merged encoder is judged on every task, under the same
   heads. So all rows of the table differ in the encoder and in nothing else.
4. Adapters of low rank are taken out of the experts, merged, and added to the base again.
5. Coefficients (lambda, t) are chosen on validation examples, from grids of one size, and the
   table shows accuracies on test examples, which none of these choices saw.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import TYPE_CHECKING, Any

from isthmus.errors import IsthmusError
from isthmus.lab.candidates import ADAPTER_RANK, Contest, adapter_contests, contests, listed
from isthmus.lab.evaluate import Accuracies, Row, evaluate, normalise
from isthmus.lab.machine import environment, let_threads_sleep, torch_threads
from isthmus.lab.packaged import minilm
from isthmus.lab.progress import Narrator
from isthmus.lab.results import Choice, DemoResults
from isthmus.lab.settings import DemoSettings
from isthmus.lab.tables import accuracy_table, reaction_remarks, remarks
from isthmus.lab.text import Task

if TYPE_CHECKING:
    from isthmus.lab.heads import Head

Merge = Callable[..., Any]
"""``merge(recipe, output_folder, overwrite=True)``, as `isthmus.merge`."""

Extract = Callable[..., Any]
"""``extract(tuned, base, output_folder, rank=..., overwrite=True)``, as `isthmus.extract`."""


def run_demo(
    output: Path,
    *,
    merge: Merge,
    extract: Extract,
    settings: DemoSettings | None = None,
    narrator: Narrator | None = None,
    reactions: bool = True,
) -> DemoResults:
    """Fine-tune experts, merge them by every method, and print and save what came out.

    Writes ``experts/``, ``heads/``, ``adapters/``, ``merged/`` and ``results.json`` into the output folder.
    Experts and heads of an earlier run with the same settings are reused; merges and tests are
    made anew.

    Args:
        output: Folder to write to; made if it is missing.
        merge: Merges a recipe into a folder: `isthmus.merge`, which lies on a floor above.
        extract: Takes an adapter out of a fine-tune: `isthmus.extract`.
        settings: Sizes, rates and seeds; by default those that take five to six minutes
            on two quiet cores.
        narrator: Shows the progress; on standard output by default.
        reactions: Whether to merge the reaction models of rxnfp as well.

    Raises:
        IsthmusError: A package with weights or text is missing, or a merge fails.
    """
    settings = DemoSettings() if settings is None else settings
    narrator = Narrator() if narrator is None else narrator
    if len(settings.sizes) < 2:
        raise IsthmusError("The demo needs two tasks at least.", "Add a task to settings.sizes.")
    output.mkdir(parents=True, exist_ok=True)
    base = minilm()
    let_threads_sleep()
    with narrator.stage("Starting torch and transformers"):
        from isthmus.lab.experts import Workshop, load_tasks
    with torch_threads(settings.threads):
        with narrator.stage("Reading texts and the base encoder"):
            tasks = load_tasks(settings)
            workshop = Workshop(base, output, settings, narrator)
        heads = {name: workshop.head(task) for name, task in tasks.items()}
        experts = {name: workshop.expert(task, heads[name]) for name, task in tasks.items()}
        bench = _Bench(workshop.encoder, heads, tasks, narrator)
        rows, expert_accuracy = _rows_before_merging(bench, experts)
        on_validation = bench.validation_of_experts(experts)
        choices: dict[str, Choice] = {}
        adapters = _adapters(base, experts, output / "adapters", extract, narrator)
        for contest in [*contests(base, experts), *adapter_contests(base, adapters)]:
            folder, seconds, choice = _hold(contest, output / "merged", merge, bench, on_validation)
            accuracy = bench.test(folder, contest.method)
            rows.append(
                Row(
                    name=contest.method,
                    kind="merged",
                    accuracy=accuracy,
                    normalised=normalise(accuracy, expert_accuracy),
                    merge_seconds=seconds,
                    setting=choice.setting if choice.validation else "",
                    note=_note(contest, choice, tuple(tasks)),
                )
            )
            choices[contest.method] = choice
        chemistry = None
        if reactions:
            with narrator.stage("Reaction models: merge, load, run"):
                from isthmus.lab.reactions import merge_reactions

                chemistry = merge_reactions(output / "merged" / "reactions", merge)
    results = DemoResults(
        settings=settings,
        classes={name: task.classes for name, task in tasks.items()},
        rows=tuple(rows),
        choices=choices,
        stages=tuple(narrator.stages),
        environment=environment(settings.threads),
        reactions=chemistry,
    )
    results.write(output / "results.json")
    _tell(results, narrator)
    return results


def _adapters(
    base: Path, experts: Mapping[str, Path], folder: Path, extract: Extract, narrator: Narrator
) -> dict[str, Path]:
    """A LoRA adapter out of each expert."""
    with narrator.stage("Adapters out of the experts", len(experts)) as advance:
        for name, expert in experts.items():
            extract(expert, base, folder / name, rank=ADAPTER_RANK, overwrite=True)
            advance(1)
    return {name: folder / name for name in experts}


@dataclass(frozen=True)
class _Bench:
    """Judges encoders: the same heads and the same texts for all of them."""

    base: Any
    heads: Mapping[str, Head]
    tasks: Mapping[str, Task]
    narrator: Narrator

    def open(self, folder: Path) -> Any:
        """Load an encoder; all of them share the base's tokenizer."""
        from isthmus.lab.encoders import Encoder

        return Encoder.load(folder, self.base.tokenizer)

    def test(self, folder: Path | None, name: str) -> Accuracies:
        """Test accuracy of the encoder in a folder, or of the base."""
        texts = sum(len(task.test) for task in self.tasks.values())
        with self.narrator.stage(f"Test of {name}", texts) as advance:
            encoder = self.base if folder is None else self.open(folder)
            return evaluate(encoder, self.heads, self.tasks, "test", advance)

    def validate(self, folder: Path, tasks: tuple[str, ...]) -> Accuracies:
        """Validation accuracy on some of the tasks."""
        chosen = {name: self.tasks[name] for name in tasks}
        return evaluate(self.open(folder), self.heads, chosen, "validation")

    def validation_of_experts(self, experts: Mapping[str, Path]) -> Accuracies:
        """Validation accuracy of each expert on its own task."""
        with self.narrator.stage("Validation of the experts"):
            return {name: self.validate(folder, (name,))[name] for name, folder in experts.items()}


def _rows_before_merging(
    bench: _Bench, experts: Mapping[str, Path]
) -> tuple[list[Row], Accuracies]:
    """Rows of the base and the experts; and the accuracy of each expert on its own task."""
    accuracies = {"base": bench.test(None, "the base")}
    for name, folder in experts.items():
        accuracies[name] = bench.test(folder, f"the {name} expert")
    own = {name: accuracies[name][name] for name in experts}
    rows = [
        Row("base", "base", accuracies["base"], normalise(accuracies["base"], own)),
        *(
            Row(f"{name} expert", "expert", accuracies[name], normalise(accuracies[name], own))
            for name in experts
        ),
    ]
    return rows, own


def _hold(
    contest: Contest, folder: Path, merge: Merge, bench: _Bench, experts: Accuracies
) -> tuple[Path, float, Choice]:
    """Merge every candidate, keep the one that validation likes best; the first of equals.

    Returns:
        Folder of the kept model, seconds that its merge took, and the choice.
    """
    kept = folder / contest.method
    trial = folder / f".{contest.method}.trial"
    shutil.rmtree(trial, ignore_errors=True)
    validation: dict[str, float] = {}
    best: tuple[float, float, int] | None = None
    total = len(contest.candidates)
    with bench.narrator.stage(_stage_name(contest), total) as advance:
        for index, candidate in enumerate(contest.candidates):
            start = perf_counter()
            merge(candidate.recipe, trial, overwrite=True)
            seconds = perf_counter() - start
            score = 0.0
            if total > 1:
                accuracy = bench.validate(trial, contest.tasks)
                score = fmean(normalise(accuracy, experts).values())
                validation[candidate.setting] = score
            if best is None or score > best[0]:
                best = (score, seconds, index)
                shutil.rmtree(kept, ignore_errors=True)
                trial.rename(kept)
            advance(1)
    shutil.rmtree(trial, ignore_errors=True)
    assert best is not None, "a contest has at least one candidate"
    _, seconds, index = best
    winner = contest.candidates[index]
    return kept, seconds, Choice(winner.setting, winner.recipe, validation)


def _note(contest: Contest, choice: Choice, tasks: tuple[str, ...]) -> str:
    """What the reader must know about the method's line; stands below the table."""
    notes = [] if choice.validation else [choice.setting]
    if contest.note:
        notes.append(contest.note)
    if contest.tasks != tasks:
        noun = "expert" if len(contest.tasks) == 1 else "experts"
        notes.append(f"of the {listed(contest.tasks)} {noun} only")
    return " ".join(notes)


def _stage_name(contest: Contest) -> str:
    total = len(contest.candidates)
    if total == 1:
        return f"Merge by {contest.method}"
    return f"Trials of {contest.method} ({total} merges, validation)"


def _tell(results: DemoResults, narrator: Narrator) -> None:
    """Print the table, what belongs to it, the reaction models and the total time."""
    narrator.console.print(accuracy_table(results))
    for line in remarks(results):
        narrator.say(line)
    if results.reactions is not None:
        narrator.say("")
        for line in reaction_remarks(results.reactions):
            narrator.say(line)
    narrator.say("")
    narrator.say(f"All stages: {results.seconds:.0f} s")
