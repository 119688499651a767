"""Sweeps whose files are damaged, whose disk is full, whose processes are stopped from outside."""

from __future__ import annotations

import errno
import io
import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sweep_toys import TOYS

from isthmus.errors import IsthmusError, OutputError
from isthmus.lab.progress import Narrator
from isthmus.lab.sweeps import local, run, work
from isthmus.lab.sweeps.index import INDEX, read_index
from isthmus.lab.sweeps.plan import Sweep
from isthmus.lab.sweeps.record import RunRecord, read_record
from isthmus.lab.sweeps.run import read_runs, rebuilt, run_sweep
from isthmus.lab.sweeps.work import Work, execute

HERE = Path(__file__).parent
SWEEP = Sweep("toy", ({"x": 1}, {"x": 2}))


def ran(folder: Path, sweep: Sweep = SWEEP, **options: Any) -> tuple[RunRecord, ...]:
    narrator = Narrator(Console(file=io.StringIO()))
    options = {"workers": 1, "cache": folder.parent, "experiments": TOYS} | options
    return run_sweep(sweep, folder, narrator=narrator, **options)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[RunRecord, ...]]:
    folder = tmp_path_factory.mktemp("done") / "sweep"
    return folder, ran(folder)


@pytest.fixture
def copy(done: tuple[Path, tuple[RunRecord, ...]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(done[0], tmp_path / "sweep"))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 1, "runs": ["0123456789abcdef"]}',
        '{"format": 1, "experiment": "toy", "runs": "all"}',
        '{"format": 1, "experiment": ["toy"], "runs": []}',
        '{"format": 1, "experiment": "toy", "runs": [3]}',
    ],
)
def test_a_damaged_file_of_the_sweep_is_written_anew(
    content: str, copy: Path, done: tuple[Path, tuple[RunRecord, ...]]
) -> None:
    whole = (copy / "sweep.json").read_text()
    (copy / "sweep.json").write_text(content)
    with pytest.raises(OutputError, match="writes it anew"):
        rebuilt(copy)
    assert ran(copy) == done[1]
    assert (copy / "sweep.json").read_text() == whole


def test_a_lost_file_of_the_sweep_is_written_anew(
    copy: Path, done: tuple[Path, tuple[RunRecord, ...]]
) -> None:
    (copy / "sweep.json").unlink()
    assert ran(copy) == done[1]
    assert rebuilt(copy) == done[1]


def test_without_its_file_another_sweep_is_refused_by_the_names_of_its_runs(copy: Path) -> None:
    (copy / "sweep.json").write_text("{")
    with pytest.raises(OutputError, match="2 of its 2 runs are not in this one"):
        ran(copy, Sweep("toy", ({"x": 7},)))
    assert (copy / "sweep.json").read_text() == "{"


def test_killed_while_it_wrote_its_first_file_a_sweep_can_begin_again(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / ".sweep.json.0a1b2c3d").write_text("{")
    assert len(ran(folder)) == 2


def test_a_file_of_a_later_version_is_left_alone(copy: Path) -> None:
    content = json.loads((copy / "sweep.json").read_text()) | {"format": 2}
    (copy / "sweep.json").write_text(json.dumps(content))
    with pytest.raises(OutputError, match="version 2, not 1"):
        ran(copy)
    assert json.loads((copy / "sweep.json").read_text()) == content


def test_the_sweep_of_another_experiment_is_refused(copy: Path) -> None:
    other = {"tog": replace(TOYS["toy"], name="tog")}
    with pytest.raises(OutputError, match="of toy, not of tog"):
        ran(copy, Sweep("tog", SWEEP.runs), experiments=other)


def test_a_file_is_no_sweep(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    with pytest.raises(OutputError, match="holds no sweep"):
        rebuilt(tmp_path / "letter.txt")
    with pytest.raises(OutputError, match="File exists"):
        ran(tmp_path / "letter.txt")


@pytest.mark.parametrize(
    "wrong",
    [
        {"metrics": 5},
        {"settings": []},
        {"seconds": "long"},
        {"status": "fine"},
        {"error": 3},
        {"name": "x"},
        {"format": 0},
    ],
    ids=str,
)
def test_a_record_of_the_wrong_types_is_a_run_that_is_not_over(
    wrong: dict[str, Any], copy: Path, done: tuple[Path, tuple[RunRecord, ...]]
) -> None:
    place = copy / "runs" / done[1][0].name
    assert read_record(place) == done[1][0]
    content = json.loads((place / "metrics.json").read_text())
    (place / "metrics.json").write_text(json.dumps(content | wrong))
    assert read_record(place) is None
    assert rebuilt(copy) == done[1][1:]


def test_an_index_of_the_wrong_types_is_damaged(copy: Path) -> None:
    base = sqlite3.connect(copy / INDEX)
    base.execute("UPDATE runs SET metrics = '5'")
    base.commit()
    base.close()
    with pytest.raises(OutputError, match="no index of a sweep"):
        read_index(copy)


def test_an_index_that_is_removed_under_way_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    add = run.add_to_index

    def removing(*arguments: Any) -> None:
        (folder / INDEX).unlink()
        add(*arguments)

    monkeypatch.setattr(run, "add_to_index", removing)
    records = ran(folder)
    assert [record.status for record in records] == ["done", "done"]
    assert read_index(folder) == list(records)


def test_an_index_is_not_made_anew_under_a_running_sweep(copy: Path) -> None:
    from isthmus.checkpoints.locking import locked

    with locked(copy, ""):
        with pytest.raises(OutputError, match="a sweep is running in"):
            rebuilt(copy)
        assert len(read_runs(copy)) == 2


def test_a_moved_folder_and_a_link_to_it_are_the_same_sweep(
    copy: Path, tmp_path: Path, done: tuple[Path, tuple[RunRecord, ...]]
) -> None:
    copy.rename(tmp_path / "moved")
    (tmp_path / "link").symlink_to(tmp_path / "moved")
    assert ran(tmp_path / "link") == done[1]


@pytest.mark.parametrize("workers", [0, -1, 10_000])
def test_impossible_crews(workers: int, tmp_path: Path) -> None:
    with pytest.raises(IsthmusError, match=f"{workers} workers"):
        ran(tmp_path / "sweep", workers=workers)
    assert not (tmp_path / "sweep").exists()


def test_more_threads_than_a_machine_can_bear(tmp_path: Path) -> None:
    with pytest.raises(IsthmusError, match="of 100000 threads"):
        ran(tmp_path / "sweep", threads=100_000)


def toy_work(tmp_path: Path, **settings: Any) -> Work:
    return Work(TOYS["toy"], "0" * 16, settings, tmp_path / ("0" * 16), tmp_path, 1)


def test_a_run_that_breaks_for_want_of_room_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch only says that a position was unexpected."""
    broken = toy_work(tmp_path, what="break")
    monkeypatch.setattr(work.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(OutputError, match="the disk is full"):
        execute(broken)
    assert read_record(broken.folder) is None
    monkeypatch.undo()
    assert execute(broken).status == "failed"


def test_an_error_that_names_the_disk_is_the_disks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr("sweep_toys.time.sleep", full)
    with pytest.raises(OutputError, match="cannot be written"):
        execute(toy_work(tmp_path))


CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {here!r})
from sweep_toys import TOYS
from isthmus.lab.sweeps.plan import Sweep
from isthmus.lab.sweeps.run import run_sweep
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    runs = tuple({{"x": x, "seconds": 30.0}} for x in range(2))
    run_sweep(Sweep("toy", runs), folder, experiments=TOYS, cache=folder.parent)
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
def test_a_signal_to_the_whole_group_stops_all_and_fails_no_run(
    sent: signal.Signals, tmp_path: Path
) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(here=str(HERE)))
    folder = tmp_path / "sweep"
    child = subprocess.Popen(
        [sys.executable, script, folder],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while len(list(folder.glob("runs/*/begun.txt"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(child.pid, sent)
    # The pipe closes only when the workers have ended too.
    said = child.communicate(timeout=10)[1].decode()
    assert said.count("Traceback") == (1 if sent == signal.SIGINT else 0)
    assert child.returncode in (-sent, 130, 1)
    assert len(list(folder.glob("runs/*/begun.txt"))) == 2
    assert not list(folder.glob("runs/*/metrics.json"))


@pytest.mark.slow
def test_workers_do_not_hear_the_signals_of_the_group(tmp_path: Path) -> None:
    """In a process that has started no other yet."""
    script = tmp_path / "child.py"
    script.write_text(
        CHILD.format(here=str(HERE)).replace('"seconds": 30.0', '"what": "listen", "seconds": 0.5')
    )
    subprocess.run([sys.executable, script, tmp_path / "sweep"], check=True, capture_output=True)
    found = [record.metrics["deaf to"] for record in read_runs(tmp_path / "sweep")]
    assert found == [[signal.SIGINT, signal.SIGTERM]] * 2


def told_to_nobody(pipe: Any, place: Path) -> None:
    execute(toy_work(place), partial(local._tell, pipe, "0" * 16))


def test_a_worker_whose_sweep_is_gone_notes_no_failure(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    ours.close()
    process = context.Process(target=told_to_nobody, args=(theirs, tmp_path))
    process.start()
    process.join()
    assert process.exitcode == 1
    assert (tmp_path / ("0" * 16) / "begun.txt").exists()
    assert read_record(tmp_path / ("0" * 16)) is None
