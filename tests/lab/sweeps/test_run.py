"""Running sweeps: what is kept, what is done again, what is refused."""

from __future__ import annotations

import fcntl
import io
import os
import random
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sweep_toys import TOYS

from isthmus.errors import IsthmusError, OutputError
from isthmus.lab.progress import Narrator
from isthmus.lab.sweeps.index import INDEX, read_index
from isthmus.lab.sweeps.plan import Sweep
from isthmus.lab.sweeps.record import RunRecord
from isthmus.lab.sweeps.run import rebuilt, run_sweep

HERE = Path(__file__).parent


def toys(*runs: dict[str, Any]) -> Sweep:
    return Sweep("toy", runs)


def ran(sweep: Sweep, folder: Path, **options: Any) -> tuple[RunRecord, ...]:
    options.setdefault("narrator", Narrator(Console(file=io.StringIO())))
    return run_sweep(sweep, folder, experiments=TOYS, cache=folder.parent, **options)


def untimed(records: list[RunRecord] | tuple[RunRecord, ...]) -> list[RunRecord]:
    return [replace(record, seconds=0.0) for record in records]


SOME = toys(*({"x": x} for x in range(5)), {"what": "diverge"})


def test_records_come_in_the_order_of_the_sweep_and_are_the_index(tmp_path: Path) -> None:
    records = ran(SOME, tmp_path / "sweep")
    assert [record.metrics.get("square") for record in records] == [0, 1, 4, 9, 16, None]
    assert [record.status for record in records] == ["done"] * 5 + ["diverged"]
    assert records[5].metrics == {"diverged_step": 7}
    assert read_index(tmp_path / "sweep") == list(records)
    assert not list((tmp_path / "sweep").rglob("*.pt"))


def test_the_number_of_workers_changes_nothing(tmp_path: Path) -> None:
    one, three = (ran(SOME, tmp_path / str(n), workers=n) for n in (1, 3))
    assert untimed(one) == untimed(three)


def test_what_is_over_is_not_done_again_and_a_sweep_may_grow(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    first = ran(SOME, folder)
    grown = toys({"x": 9}, *SOME.runs)
    again = ran(grown, folder)
    assert list(again[1:]) == list(first)
    assert again[0].metrics["square"] == 81
    begun = [len(path.read_text().split()) for path in folder.rglob("begun.txt")]
    assert begun == [1] * 7
    assert read_index(folder) == list(again)


def test_a_sweep_that_lost_runs_is_refused(tmp_path: Path) -> None:
    ran(SOME, tmp_path / "sweep")
    with pytest.raises(OutputError, match="5 of its 6 runs are not in this one"):
        ran(toys({"x": 1}), tmp_path / "sweep")


def test_failures_are_kept_and_the_sweep_goes_on(tmp_path: Path) -> None:
    sweep = toys({"what": "break"}, {"what": "die"}, {"what": "nan"}, {"x": 3})
    records = ran(sweep, tmp_path / "sweep", workers=1)
    assert [record.status for record in records] == ["failed", "failed", "failed", "done"]
    assert "ZeroDivisionError: one over nothing (in sweep_toys.py:" in (records[0].error or "")
    assert "killed by signal 9" in (records[1].error or "")
    assert "not JSON compliant" in (records[2].error or "")
    assert read_index(tmp_path / "sweep") == list(records)


def test_failed_runs_are_done_again_only_if_asked(tmp_path: Path) -> None:
    sweep = toys({"what": "break once"}, {"x": 1})
    assert ran(sweep, tmp_path / "sweep")[0].status == "failed"
    (tmp_path / "mended").touch()
    assert ran(sweep, tmp_path / "sweep")[0].status == "failed"
    assert ran(sweep, tmp_path / "sweep", retry_failed=True)[0].status == "done"


def test_a_damaged_index_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    records = ran(SOME, folder)
    (folder / INDEX).write_bytes(b"no database" * 100)
    with pytest.raises(OutputError, match="no index"):
        read_index(folder)
    assert list(rebuilt(folder)) == list(records)
    assert read_index(folder) == list(records)
    (folder / INDEX).write_bytes(b"no database" * 100)
    assert ran(SOME, folder) == records
    assert read_index(folder) == list(records)


def test_a_damaged_record_is_a_run_that_is_not_over(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    records = ran(SOME, folder)
    path = folder / "runs" / records[2].name / "metrics.json"
    path.write_text(path.read_text()[:40])
    assert untimed(ran(SOME, folder)) == untimed(records)


def test_two_sweeps_in_one_folder_at_once_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        with pytest.raises(OutputError, match="another sweep is running in"):
            ran(SOME, folder)
    finally:
        os.close(held)
    assert len(ran(SOME, folder)) == 6


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    with pytest.raises(OutputError, match=r"letter\.txt"):
        ran(SOME, tmp_path)


def test_names_in_a_sweeps_file_cannot_lead_elsewhere(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "sweep.json").write_text('{"format": 1, "experiment": "toy", "runs": ["../../x"]}')
    with pytest.raises(OutputError, match="names runs as no sweep does"):
        rebuilt(folder)


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        (toys(), "no runs"),
        (toys({"x": 1}, {"x": 1, "seed": 0}), "run 2 of the sweep is there already"),
        (toys({"y": 1}), "y: Extra inputs"),
        (toys({"x": -1}), "x: Input should be greater"),
        (Sweep("toi", ({},)), "Did you mean 'toy'"),
    ],
)
def test_sweeps_that_make_no_sense(sweep: Sweep, said: str, tmp_path: Path) -> None:
    with pytest.raises(IsthmusError, match=said):
        ran(sweep, tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


def test_a_disk_that_takes_nothing_stops_the_sweep_and_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    first = ran(toys({"x": 0}), folder)
    # A file where the runs' folder should be made stands in for a disk that refuses.
    (folder / "runs" / "blocked").touch()
    grown = toys({"x": 0}, {"x": 1})
    from isthmus.lab.sweeps.plan import planned

    blocked = planned(grown, TOYS["toy"])[1].name
    (folder / "runs" / blocked).touch()
    with pytest.raises(OutputError, match=blocked):
        ran(grown, folder)
    assert read_index(folder) == list(first)


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from sweep_toys import TOYS
from isthmus.lab.sweeps.plan import Sweep
from isthmus.lab.sweeps.run import run_sweep
if __name__ == "__main__":
    runs = tuple({{"x": x, "seconds": 0.15}} for x in range(8))
    folder = Path(sys.argv[1])
    run_sweep(Sweep("toy", runs), folder, experiments=TOYS, cache=folder.parent)
"""


@pytest.mark.slow
def test_killed_at_random_and_resumed_it_ends_as_undisturbed(tmp_path: Path) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(here=str(HERE)))
    sweep = toys(*({"x": x, "seconds": 0.15} for x in range(8)))
    whole = ran(sweep, tmp_path / "whole")
    folder = tmp_path / "killed"
    draw = random.Random(0)
    caught = 0
    for _ in range(4):
        child = subprocess.Popen([sys.executable, script, folder], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while not list(folder.glob("runs/*/begun.txt")) and time.monotonic() < deadline:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.4))
        caught += child.poll() is None
        child.kill()
        child.wait()
    assert caught > 0
    resumed = ran(sweep, folder)
    assert untimed(resumed) == untimed(whole)
    assert untimed(read_index(folder)) == untimed(whole)


@pytest.mark.slow
def test_ray_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    sweep = toys(*SOME.runs, {"what": "break"}, {"what": "die"})
    local = ran(sweep, tmp_path / "local")
    there = ran(sweep, tmp_path / "ray", executor="ray")
    assert untimed(there[:-1]) == untimed(local[:-1])
    assert there[-1].status == "failed"
    assert untimed(read_index(tmp_path / "ray")) == untimed(there)
