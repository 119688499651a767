"""The adapter suite's results as a table for a terminal, and the sentences that belong to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import sqrt
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from isthmus.lab.adapters_results import AdapterResults
from isthmus.lab.candidates import listed
from isthmus.lab.evaluate import Row
from isthmus.lab.progress import Narrator
from isthmus.lab.tables import USUAL_ACCURACY


def adapters_table(results: AdapterResults) -> Table:
    """Test accuracy in percent by task, and the mean share of the single adapters'."""
    table = Table(
        title="Test accuracy in %; kept: % of the single adapters'; time in s",
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
    )
    # Six tasks must fit a terminal of 80 columns: headings fold, figures do not.
    table.add_column("update", overflow="fold", min_width=15, max_width=15)
    table.add_column("rank", justify="right")
    for task in results.tasks:
        heading = Text(task.replace("_", " "))
        table.add_column(heading, justify="right", overflow="fold", min_width=6, max_width=6)
    for summary in ("kept", "±", "time"):
        table.add_column(summary, justify="right", no_wrap=True)
    kind = None
    for row in results.rows:
        if kind not in (None, row.kind):
            table.add_section()
        kind = row.kind
        rank = results.rank(row.name)
        table.add_row(
            Text(row.name),
            "" if rank is None else str(rank),
            *(f"{100 * row.accuracy[task]:.1f}" for task in results.tasks),
            f"{100 * row.mean_normalised:.1f}",
            "" if (spread := results.spread(row.name)) is None else f"{100 * spread:.1f}",
            "" if row.merge_seconds is None else f"{row.merge_seconds:.1f}",
        )
    return table


def kept(results: AdapterResults, row: Row) -> str:
    """Mean normalised accuracy in percent, with its standard deviation over seeds if known."""
    spread = results.spread(row.name)
    mean = f"{100 * row.mean_normalised:.1f}"
    return mean if spread is None else f"{mean} ±{100 * spread:.1f}"


def adapters_remarks(results: AdapterResults) -> Iterator[str]:
    """What stands below the table, one sentence or two a line."""
    seeds = [str(result.seed) for result in results.seeds]
    sizes = results.settings.sizes.values()
    count = sum(size.test for size in sizes)
    error = sqrt(USUAL_ACCURACY * (1 - USUAL_ACCURACY) / count)
    yield (
        f"Seed{'s' if len(seeds) > 1 else ''} {listed(seeds)}; ± is the standard deviation over "
        f"seeds. A mean accuracy of one seed has a standard error of ±{100 * error:.1f} points "
        f"at {100 * USUAL_ACCURACY:.0f} % with {count:,} test examples. Rows share their examples, so "
        "differences between them are somewhat surer."
    )
    yield (
        f"Every method that has a scale or a density chose among {results.settings.tries} tries on "
        "validation; linear, the plain mean, has none."
    )
    alike = [result.likeness for result in results.seeds]
    yield (
        f"The adapters, mean over modules, pairs and seeds: column spaces overlap by "
        f"{100 * fmean(one.overlap for one in alike):.0f} %, the cosine of two updates is "
        f"{fmean(one.cosine for one in alike):.2f}, and an update's effective rank is "
        f"{fmean(one.effective_rank for one in alike):.1f} of {results.settings.lora.rank}."
    )
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
    # Other seeds say the same with other figures; results.json has them all.
    first = results.seeds[0]
    for name, detail in first.details.items():
        for note in detail.notes:
            yield f"{name}, seed {first.seed}: {note}"


def tell(results: AdapterResults, narrator: Narrator) -> None:
    """Print the table, what belongs to it, and the total time."""
    narrator.console.print(adapters_table(results))
    for line in adapters_remarks(results):
        narrator.say(line)
    narrator.say("")
    narrator.say(f"All stages: {results.seconds:.0f} s")
