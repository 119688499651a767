"""The experiments' results as tables, and the sentences that belong to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import sqrt

from isthmus.lab.candidates import listed
from isthmus.lab.grid import Grid
from isthmus.lab.progress import Narrator
from isthmus.lab.projection.digits_results import FAMILIES, DigitsResults
from isthmus.lab.projection.language_settings import LanguageResults
from isthmus.lab.projection.many import MANY
from isthmus.lab.projection.results import Checks, Merged, ProjectionResults, correlations
from isthmus.lab.tables import USUAL_ACCURACY


def tell(grids: Sequence[Grid], remarks: Iterator[str], narrator: Narrator) -> None:
    """Print tables and what belongs to them."""
    for grid in grids:
        narrator.console.print(grid.table())
    for line in remarks:
        narrator.say(line)


def projection_grid(results: ProjectionResults) -> Grid:
    """Test accuracy in percent by task, the mean share of the experts', captured energy."""
    return Grid(
        "Test accuracy in %; kept: % of the experts'; captured energy; time in s",
        ("update", *(task.replace("_", " ") for task in results.tasks), "kept", "±", "capt.", "s"),
        tuple(
            (
                row.name,
                *(f"{100 * row.accuracy[task]:.1f}" for task in results.tasks),
                f"{100 * row.mean_normalised:.1f}",
                _percent(results.spread(row.name)),
                _energy(results.captured(row.name)),
                _seconds(row.merge_seconds),
            )
            for row in results.rows
        ),
    )


def many_grid(results: ProjectionResults) -> Grid:
    """The merges of the correlation."""
    return Grid(
        "Many merges: captured energies; kept: % of the experts' accuracy on validation",
        ("merge", "kind", "all layers", "mean of layers", "features", "kept"),
        tuple(
            (
                merge.name,
                merge.group,
                _energy(merge.captured),
                _energy(merge.mean_captured),
                _energy(merge.output),
                f"{100 * merge.mean_normalised:.1f}",
            )
            for merge in results.many
        ),
    )


def remarks(results: ProjectionResults) -> Iterator[str]:
    """What stands below the tables, one sentence or two a line."""
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
        "has in the experts. Sequential merges minimise another one, and may have little of this."
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
    if results.many:
        many = results.many
        yield f"Over {len(many)} merges, Spearman's correlation with accuracy: {_told(many)}."
        for group, some in grouped(many).items():
            yield f"Of these, {len(some)} {group}: {_told(some)}."


def grouped(many: Sequence[Merged]) -> dict[str, list[Merged]]:
    """Merges by kind, and without and with those that compute inputs anew with what is merged."""
    anew = {variant.contest.name for variant in MANY if variant.contest.reads == "examples"}
    groups = {
        "that are not sequential": [merge for merge in many if merge.name not in anew],
        "sequential": [merge for merge in many if merge.name in anew],
    }
    for merge in many:
        groups.setdefault(merge.group, []).append(merge)
    return {name: some for name, some in groups.items() if len(some) > 2}


def checked(checks: Checks) -> str:
    """Whether solutions are as good as the points in their bases, in words."""
    if checks.violations:
        return (
            f"WRONG: of {checks.compared:,} heuristics in the basis of a layer's solution "
            f"{len(checks.violations)} have a smaller J, which can only be an error: "
            f"{listed(checks.violations[:5])}."
        )
    return (
        f"In every layer J at the solution is at most J of each heuristic in its basis: "
        f"{checks.compared:,} comparisons."
    )


def digits_grids(results: DigitsResults) -> list[Grid]:
    """A table for each number of experts and size of calibration."""
    return [
        Grid(
            f"{count} experts, {calibration} calibration pictures each",
            ("merge", "captured", "on test", "MSE", "of ten, %", "±", "of its own, %"),
            tuple(
                (
                    row.name,
                    _energy(row.captured),
                    _energy(row.held_out),
                    f"{row.mse:.1f}",
                    f"{100 * row.accuracy:.1f}",
                    _percent(results.spread(count, calibration, row.name)),
                    f"{100 * row.within:.1f}",
                )
                for row in results.mean(count, calibration)
            ),
        )
        for count in results.settings.experts
        for calibration in results.settings.calibration
    ]


def digits_remarks(results: DigitsResults) -> Iterator[str]:
    """What stands below these tables."""
    seeds = [str(seed) for seed in results.settings.seeds]
    yield f"Means over seed{'s' if len(seeds) > 1 else ''} {listed(seeds)}."
    yield (
        "Captured: on the calibration pictures; on test: the same share of the error on test pictures. "
        "Of ten: every digit is possible; of its own: among the digits of the picture's expert."
    )
    yield checked(
        Checks(
            sum(run.compared for run in results.runs),
            tuple(violation for run in results.runs for violation in run.violations),
        )
    )
    number = len(results.runs[0].many)
    figures = ("held_out", "accuracy")
    yield (
        f"Spearman's correlation of what is captured on test with the accuracy of ten, over {number} bases "
        "and over those of rows, columns and ranks alone:"
    )
    for count in results.settings.experts:
        for calibration in results.settings.calibration:
            told = ", ".join(
                f"{family or 'all'} {results.correlation(count, calibration, *figures, family):.2f}"
                for family in ("", *FAMILIES)
            )
            yield f"{count} experts, {calibration} pictures: {told}."


def language_grid(results: LanguageResults) -> Grid:
    """Perplexity by domain."""
    return Grid(
        "Perplexity on held-out texts",
        ("model", *results.domains, "mean", "±", "captured", "s"),
        tuple(
            (
                row.name,
                *(f"{row.perplexity(domain):.2f}" for domain in results.domains),
                f"{row.mean_perplexity:.2f}",
                "" if (spread := results.spread(row.name)) is None else f"{spread:.2f}",
                _energy(row.captured),
                _seconds(row.seconds),
            )
            for row in results.rows
        ),
    )


def language_remarks(results: LanguageResults) -> Iterator[str]:
    """What stands below this table."""
    settings = results.settings
    seeds = [str(result.seed) for result in results.seeds]
    yield (
        f"Seed{'s' if len(seeds) > 1 else ''} {listed(seeds)}; mean is the geometric mean. "
        "Single experts: each domain under its own expert."
    )
    yield (
        f"task_arithmetic, ties and dare_ties chose among {settings.tries} tries on validation; the "
        "other merges have nothing to choose. Calibrated merges see "
        f"{settings.calibration} training texts of each domain."
    )
    yield checked(results.checks)


def _told(merges: Sequence[Merged]) -> str:
    found = correlations(merges)
    return ", ".join(f"{name} {value:.2f}" for name, value in found.items())


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _energy(value: float | None) -> str:
    """Two digits, but no row of digits where a merge is far worse than the base."""
    if value is None:
        return ""
    return f"{value:.2f}" if value > -10 else f"{value:.0e}"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
