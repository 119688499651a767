"""The reports of `isthmus lab projection`: one HTML file each that needs no other file and no network."""

from __future__ import annotations

from isthmus.lab.projection.digits_results import DigitsResults
from isthmus.lab.projection.language_settings import LanguageResults
from isthmus.lab.projection.results import ProjectionResults
from isthmus.lab.projection.tables import (
    digits_grids,
    digits_remarks,
    language_grid,
    language_remarks,
    many_grid,
    projection_grid,
    remarks,
)
from isthmus.reports.html import figure_markup
from isthmus.reports.lab_page import Page, markup
from isthmus.reports.projection_figures import Cloud, energy_figure


def encoders_page(results: ProjectionResults) -> Page:
    """Of the vision and the text experiment."""
    vision = results.settings.family == "vision"
    what = "a small vision transformer" if vision else "a sentence encoder (all-MiniLM-L6-v2)"
    figures = [figure_markup(results.rows, results.tasks)]
    grids = [projection_grid(results)]
    if results.many:
        grids.append(many_grid(results))
        groups = [*dict.fromkeys(merge.group for merge in results.many)]
        panels = []
        for title, kind in (
            ("captured, all layers together", "captured"),
            ("captured, mean over layers", "mean_captured"),
            ("captured, features", "output"),
        ):
            clouds = []
            for group in groups:
                some = [merge for merge in results.many if merge.group == group]
                energies = [getattr(merge, kind) for merge in some]
                accuracies = [100 * merge.mean_normalised for merge in some]
                clouds.append(Cloud(group, energies, accuracies))
            panels.append((title, clouds))
        figures.append(markup(energy_figure(panels, "accuracy, % of the experts'")))
    return Page(
        title="Output-space projection of full fine-tunes",
        intro=f"{len(results.tasks)} fine-tunes of {what}, all layers, merged in "
        f"{len(results.seeds[0].details)} ways. All stages took {results.seconds:.0f} s.",
        grids=grids,
        remarks=[*remarks(results)],
        figures=figures,
        recipes={
            f"Seed {seed.seed}": {name: detail.recipe for name, detail in seed.details.items()}
            for seed in results.seeds
        },
        environment=results.environment,
    )


def digits_page(results: DigitsResults) -> Page:
    """Of the experiment with digits."""
    figures = []
    for calibration in results.settings.calibration:
        panels = []
        for title, kind in (("captured", "captured"), ("captured on test pictures", "held_out")):
            clouds = []
            for count in results.settings.experts:
                rows = [row for run in results.of(count, calibration) for row in run.many]
                energies = [getattr(row, kind) for row in rows]
                label = f"{count} experts"
                clouds.append(Cloud(label, energies, [100 * row.accuracy for row in rows]))
            panels.append((f"{title}, {calibration} pictures", clouds))
        figures.append(markup(energy_figure(panels, "accuracy among ten digits, %")))
    return Page(
        title="Output-space projection of one layer",
        intro="Experts of disjoint digits of MNIST, one linear layer on 14 x 14 pixels.",
        grids=digits_grids(results),
        remarks=[*digits_remarks(results)],
        figures=figures,
        environment=results.environment,
    )


def language_page(results: LanguageResults) -> Page:
    """Of the experiment with a language model."""
    return Page(
        title="Output-space projection of a language model",
        intro=f"Fine-tunes of a Llama of {results.parameters:,} parameters for "
        f"{', '.join(results.domains)}.",
        grids=[language_grid(results)],
        remarks=[*language_remarks(results)],
        figures=[],
        recipes={f"Seed {seed.seed}": seed.recipes for seed in results.seeds},
        environment=results.environment,
    )
