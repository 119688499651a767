"""What `isthmus lab projection` runs, by experiment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import isthmus
from isthmus.reports.lab_page import write_page
from isthmus.reports.projection_lab import digits_page, encoders_page, language_page


def run(experiment: str, seeds: tuple[int, ...], out: Path, cache: Path, *, quick: bool) -> None:
    """Run an experiment and write its report.

    Args:
        experiment: ``digits``, ``vision``, ``text``, ``language`` or ``smollm2``.
        seeds: Of the experiment.
        out: Where results and report go.
        cache: Where data is, and where models are kept.
        quick: Whether to make it small.
    """
    if experiment == "digits":
        from isthmus.lab.projection.digits import run_all_digits
        from isthmus.lab.projection.digits_results import DigitsSettings

        digits = DigitsSettings(seeds=seeds)
        if quick:
            digits = replace(digits, experts=(2, 5), calibration=(128,), tries=3, test=1000)
        page = digits_page(run_all_digits(out, cache=cache, settings=digits))
    elif experiment in {"language", "smollm2"}:
        from isthmus.lab.projection.contests import CONTESTS, LARGE
        from isthmus.lab.projection.language import run_language
        from isthmus.lab.projection.language_settings import LanguageSettings

        large = experiment == "smollm2"
        language = LanguageSettings.smollm2(seeds) if large else LanguageSettings(seeds=seeds)
        page = language_page(
            run_language(
                out,
                merge=isthmus.merge,
                cache=cache,
                settings=language.quick() if quick else language,
                contests=LARGE if large else CONTESTS,
            )
        )
    else:
        from isthmus.lab.projection.run import run_projection
        from isthmus.lab.projection.settings import ProjectionSettings

        vision = experiment == "vision"
        settings = ProjectionSettings.vision(seeds) if vision else ProjectionSettings(seeds=seeds)
        page = encoders_page(
            run_projection(
                out,
                merge=isthmus.merge,
                cache=cache,
                settings=settings.quick() if quick else settings,
            )
        )
    write_page(page, out / "report.html", cache)
