"""Reports of experiments: what stands in them, and that nothing of it is code."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from isthmus.lab.noise.grids import PanelPlan
from isthmus.lab.noise.results import panel
from isthmus.lab.noise.run import NoiseResults
from isthmus.lab.paths.results import Joined, PathResults
from isthmus.lab.sweeps.experiments import experiment_of
from isthmus.lab.sweeps.record import RunRecord
from isthmus.reports.lab_page import write_figures, write_page
from isthmus.reports.noise_lab import noise_figures, noise_page
from isthmus.reports.paths_lab import paths_figures, paths_page, width_figure

pytest.importorskip("matplotlib")

EVIL = "<script>alert(1)</script>"


def paths(groups=("width 8", "width 16")):
    joined = [
        Joined(
            group,
            alignment,
            "linear",
            f"{pair}",
            {"train barrier": 0.5 / (1 + number) + 0.1 * pair},
            (0.0, 0.5, 1.0),
            {"test loss": (1.0, 2.0 + pair, 1.0)},
        )
        for number, group in enumerate(groups)
        for alignment in ("none", "weights")
        for pair in (0, 1)
    ]
    return PathResults(
        "toy", {}, {"train barrier": "train barrier"}, tuple(joined), (), {"python": "3"}
    )


def noise():
    runs = [
        {"data": "digits", "lr": lr, "batch": batch, "seed": seed, "examples": 100, "test": 50}
        for lr in (0.01, 0.1, 0.3)
        for batch in (8, 32)
        for seed in (0, 1)
    ]
    experiment = experiment_of("noise-pair")
    model = experiment.model()
    records = [
        RunRecord(
            f"{number:016x}",
            model.model_validate(run).model_dump(mode="json"),
            "done",
            {
                "accuracy": 0.9,
                "gain": 0.01 * run["lr"] + 0.001 * run["seed"],
                "merged_accuracy": 0.91,
                "barrier": 0.1,
                "rebasin_barrier": 0.05,
                "distance": run["lr"],
                "cka": 1 - run["lr"],
            },
            1.0,
        )
        for number, run in enumerate(runs)
    ]
    plan = PanelPlan(f"MLP, {EVIL}", tuple(runs))
    return NoiseResults("noise-pair", (panel(plan, experiment, records),), 12.0, {"python": "3"})


@pytest.mark.parametrize(
    ("results", "page", "figures"),
    [
        (paths(("width 8", "width 16")), paths_page, paths_figures),
        (paths((EVIL, "batch norm")), paths_page, paths_figures),
        (noise(), noise_page, noise_figures),
    ],
    ids=["width", "names", "noise"],
)
def test_pages_hold_figures_and_no_code(results, page, figures, tmp_path):
    write_page(page(results), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text("utf-8")
    assert text.count("<svg") == len(figures(results)) > 0
    assert EVIL not in text
    write_page(page(results), tmp_path / "again.html")
    assert (tmp_path / "again.html").read_text("utf-8") == text
    write_figures(figures(results), tmp_path / "figures")
    for file in (tmp_path / "figures").iterdir():
        assert re.fullmatch(r"[a-z0-9-]+\.svg", file.name)
        ElementTree.parse(file)


def test_the_table_of_paths_has_its_means(tmp_path):
    write_page(paths_page(paths()), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text("utf-8")
    for number, group in enumerate(("width 8", "width 16")):
        assert group in text
        assert f"{0.5 / (1 + number) + 0.05:.3f}" in text


def test_no_width_no_figure_over_it():
    assert width_figure(paths(), "train barrier") is not None
    assert width_figure(paths(("batch norm", "layer norm")), "train barrier") is None
    assert width_figure(paths(("width 8",)), "train barrier") is None
    assert width_figure(replace(paths(), joined=()), "train barrier") is None
