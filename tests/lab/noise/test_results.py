"""From records to points, curves, tables and sentences; the records are made up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from isthmus.lab.noise.grids import PanelPlan
from isthmus.lab.noise.results import Panel, panel
from isthmus.lab.noise.settings import PairSettings
from isthmus.lab.noise.tables import (
    collapse_grid,
    optimum_grid,
    point_grid,
    remarks,
    similarity_grid,
)
from isthmus.lab.sweeps.experiments import experiment_of
from isthmus.lab.sweeps.record import RunRecord

PAIR = experiment_of("noise-pair")
BASE = {"data": "digits", "examples": 100}
RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
SEEDS = (0, 1, 2)


def record(run: dict[str, Any], status: str = "done", **metrics: Any) -> RunRecord:
    settings = PairSettings(**run).model_dump(mode="json")
    return RunRecord("0" * 16, settings, status, metrics, 1.0, None)  # type: ignore[arg-type]


def runs(batches: tuple[int, ...] = (8, 32)) -> list[dict[str, Any]]:
    return [
        {**BASE, "lr": lr, "batch": batch, "seed": seed}
        for lr in RATES
        for batch in batches
        for seed in SEEDS
    ]


def gathered(
    records: list[RunRecord], planned: list[dict[str, Any]], figure: str = "gain"
) -> Panel:
    return panel(PanelPlan("MLPs", tuple(planned), figure), PAIR, records)


def peaked(run: dict[str, Any]) -> float:
    """A gain that the noise scale alone decides, highest at 0.005."""
    return 0.02 - 0.01 * abs(np.log10(run["lr"] / run["batch"] / 0.005))


def made(**more: Any) -> list[RunRecord]:
    return [
        record(run, gain=peaked(run), cka=0.9 - run["lr"], distance=run["lr"], **more)
        for run in runs()
    ]


def test_points_are_means_and_deviations_over_seeds() -> None:
    planned = [{**BASE, "lr": 0.1, "batch": 10, "seed": seed} for seed in SEEDS]
    gains = (0.01, 0.02, 0.06)
    records = [record(run, gain=gain) for run, gain in zip(planned, gains, strict=True)]
    (point,) = gathered(records, planned).points
    assert point.noise_scale == pytest.approx(0.01)
    assert (point.seeds, point.diverged) == (3, 0)
    assert point.means["gain"] == pytest.approx(np.mean(gains))
    assert point.deviations["gain"] == pytest.approx(np.std(gains, ddof=1))
    assert "seed" not in point.settings


def test_diverged_runs_are_counted_and_failed_ones_left_out() -> None:
    planned = [{**BASE, "lr": lr, "batch": 10, "seed": seed} for lr in (0.1, 9.0) for seed in SEEDS]
    status = ["done", "diverged", "failed", "diverged", "diverged", "failed"]
    records = [
        record(run, how, **({"gain": 0.5} if how == "done" else {}))
        for run, how in zip(planned, status, strict=True)
    ]
    good, bad = gathered(records, planned).points
    assert (good.seeds, good.diverged, dict(good.means)) == (1, 1, {"gain": 0.5})
    assert not good.deviations
    assert (bad.seeds, bad.diverged, dict(bad.means)) == (0, 2, {})


def test_runs_that_are_not_over_and_runs_of_others_are_no_points() -> None:
    planned = runs()
    stranger = record({**BASE, "lr": 0.3, "batch": 8}, gain=1.0)
    found = gathered([record(planned[0], gain=0.0), stranger], planned)
    assert len(found.points) == 1
    assert not found.curves
    assert found.highest is None


def test_settings_that_are_left_out_have_their_defaults() -> None:
    planned = [{**BASE, "lr": 0.1}]
    found = gathered([record({**BASE, "lr": 0.1, "batch": 64, "momentum": 0.0}, gain=0.1)], planned)
    assert len(found.points) == 1


def test_points_are_in_the_order_of_their_noise_scale() -> None:
    scales = [point.noise_scale for point in gathered(made()[::-1], runs()).points]
    assert scales == sorted(scales)


def test_a_gain_that_the_noise_scale_decides_scatters_more_around_the_other_knobs() -> None:
    found = gathered(made(), runs())
    assert found.highest is not None
    low, high = found.highest.interval
    assert low <= 0.005 <= high
    assert found.highest.at == pytest.approx(0.005, rel=0.5)
    assert found.ratios["batch"] > 2
    assert found.ratios["lr"] > 2
    assert found.ratios["noise_scale"] == 1


def test_a_knob_that_does_not_vary_has_no_curve() -> None:
    planned = runs(batches=(8,))
    found = gathered([record(run, gain=peaked(run)) for run in planned], planned)
    assert "batch" not in found.curves
    assert {"noise_scale", "lr", "lr/batch"} <= set(found.curves)


def test_the_tables_say_what_the_points_do() -> None:
    planned = runs()
    records = made(barrier=0.1, rebasin_barrier=0.04)
    # The gain of one setting is lost: all its seeds diverged.
    records[:3] = [record(run, "diverged") for run in planned[:3]]
    found = gathered(records, planned)
    collapse = collapse_grid([found])
    (row,) = collapse.rows
    cells = dict(zip(collapse.columns, row, strict=True))
    assert (cells["networks"], cells["settings"], cells["diverged"]) == ("MLPs", "12", "3")
    assert float(cells["batch"]) == pytest.approx(100 * found.curves["batch"].spread, abs=0.005)
    assert cells["effective"] == ""
    (row,) = optimum_grid([found]).rows
    assert row[3].startswith("+")
    (row,) = similarity_grid([found]).rows
    # CKA falls as the distance grows, by construction.
    assert float(row[1]) == pytest.approx(-float(row[2]))
    assert row[4:] == ("11", "0.100", "0.040")
    points = point_grid(found)
    assert points.columns[:3] == ("noise scale", "lr", "batch")
    assert len(points.rows) == 12
    lost = [row for row in points.rows if row[points.columns.index("diverged")] == "3"]
    assert len(lost) == 1
    assert lost[0][points.columns.index("gain")] == ""
    for grid in (collapse, optimum_grid([found]), similarity_grid([found]), points):
        assert all(len(row) == len(grid.columns) for row in grid.rows)


def test_small_barriers_need_no_matching() -> None:
    (row,) = similarity_grid([gathered(made(barrier=0.001, rebasin_barrier=0.0), runs())]).rows
    assert row[4:] == ("", "", "")


def test_remarks_call_an_optimum_interior_only_where_it_is() -> None:
    planned = runs()
    (inside, collapse) = remarks([gathered(made(), planned)])
    assert "has an interior optimum" in inside
    assert "at least twice as well as either alone" in collapse
    rising = [record(run, gain=float(np.log(run["lr"] / run["batch"]))) for run in planned]
    assert "no interior optimum is certain" in next(remarks([gathered(rising, planned)]))


def test_remarks_on_gains_that_have_nothing_to_do_with_noise() -> None:
    draw = np.random.default_rng(0)
    planned = runs()
    records = [
        record(run, gain=float(run["batch"] / 100 + 1e-3 * draw.normal())) for run in planned
    ]
    said = list(remarks([gathered(records, planned)]))
    assert "at least twice" not in said[-1]


def test_remarks_where_all_diverged() -> None:
    planned = runs()
    found = gathered([record(run, "diverged") for run in planned], planned)
    assert list(remarks([found])) == ["MLPs: too few settings ended well for a curve."]
    assert collapse_grid([found]).rows[0][:3] == ("MLPs", "12", "36")
    assert not optimum_grid([found]).rows
    assert not similarity_grid([found]).rows
    assert len(point_grid(found).rows) == 12
