"""The experiments' results as tables for a terminal, and the sentences that belong to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import sqrt

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from isthmus.lab.candidates import listed
from isthmus.lab.evaluate import Row
from isthmus.lab.progress import Narrator
from isthmus.lab.projection.results import Checks, Merged, ProjectionResults, correlations
from isthmus.lab.tables import USUAL_ACCURACY


def projection_table(results: ProjectionResults) -> Table:
    """Test accuracy in percent by task, the mean share of the experts', captured energy."""
    table = Table(
        title="Test accuracy in %; kept: % of the experts'; captured energy; time in s",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    # Six tasks must fit a terminal of 80 columns: headings fold, figures do not.
    table.add_column("update", overflow="fold", min_width=15, max_width=15)
    for task in results.tasks:
        heading = Text(task.replace("_", " "))
        table.add_column(heading, justify="right", overflow="fold", min_width=6, max_width=6)
    for summary in ("kept", "±", "capt.", "time"):
        table.add_column(summary, justify="right", no_wrap=True)
    kind = None
    for row in results.rows:
        if kind not in (None, row.kind):
            table.add_section()
        kind = row.kind
        spread, captured = results.spread(row.name), results.captured(row.name)
        table.add_row(
            Text(row.name),
            *(f"{100 * row.accuracy[task]:.1f}" for task in results.tasks),
            f"{100 * row.mean_normalised:.1f}",
            "" if spread is None else f"{100 * spread:.1f}",
            "" if captured is None else f"{captured:.2f}",
            "" if row.merge_seconds is None else f"{row.merge_seconds:.1f}",
        )
    return table


def kept(results: ProjectionResults, row: Row) -> str:
    """Mean normalised accuracy in percent, with its standard deviation over seeds if known."""
    spread = results.spread(row.name)
    mean = f"{100 * row.mean_normalised:.1f}"
    return mean if spread is None else f"{mean} ±{100 * spread:.1f}"


def remarks(results: ProjectionResults) -> Iterator[str]:
    """What stands below the table, one sentence or two a line."""
    settings = results.settings
    seeds = [str(result.seed) for result in results.seeds]
    count = sum(size.test for size in settings.sizes.values())
    error = sqrt(USUAL_ACCURACY * (1 - USUAL_ACCURACY) / count)
    yield (
        f"Seed{'s' if len(seeds) > 1 else ''} {listed(seeds)}; ± is the standard deviation over "
        f"seeds. A mean accuracy of one seed has a standard error of ±{100 * error:.1f} points "
        f"at {100 * USUAL_ACCURACY:.0f} % with {count:,} test examples."
    )
    yield (
        f"task_arithmetic, ties and dare_ties chose among {settings.tries} tries on validation; the "
        "other merges have nothing to choose: projection without a ridge, RegMean at keep 0.9. "
        f"Calibrated merges see {settings.calibration} training examples of each task, without labels."
    )
    yield (
        "Captured energy is that of one objective for all merges: every layer on the inputs that it "
        "has in the experts."
    )
    yield checked(results.checks)
    edges = Counter(
        name
        for result in results.seeds
        for name, detail in result.details.items()
        if detail.at_edge
    )
    for name, times in edges.items():
        yield (
            f"{name}: in {times} of {len(seeds)} seeds the best scale tried was the smallest or "
            "largest; one beyond may do better."
        )
    yield from _correlation(results)


def checked(checks: Checks) -> str:
    """Whether solutions are as good as the points in their bases, in words."""
    if checks.violations:
        return (
            f"WRONG: of {checks.compared} heuristics in the basis of a layer's solution "
            f"{len(checks.violations)} have a smaller J, which can only be an error: "
            f"{listed(checks.violations[:5])}."
        )
    return (
        f"In every layer J at the solution is at most J of each heuristic in its basis: "
        f"{checks.compared} comparisons."
    )


def _correlation(results: ProjectionResults) -> Iterator[str]:
    many = results.many
    if not many:
        return
    yield f"Over {len(many)} merges, Spearman's correlation with accuracy: {_told(many)}."
    for group in dict.fromkeys(merge.group for merge in many):
        some = [merge for merge in many if merge.group == group]
        yield f"Of these, {len(some)} {group}: {_told(some)}."


def _told(merges: Sequence[Merged]) -> str:
    found = correlations(merges)
    return ", ".join(f"{name} {value:.2f}" for name, value in found.items())


def tell(results: ProjectionResults, narrator: Narrator) -> None:
    """Print the table, what belongs to it, and the total time."""
    narrator.console.print(projection_table(results))
    for line in remarks(results):
        narrator.say(line)
    narrator.say("")
    narrator.say(f"All stages: {results.seconds:.0f} s")
