"""`isthmus lab sweep` and `isthmus lab runs` as they are called."""

from __future__ import annotations

import csv
import io
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isthmus.checkpoints.locking import locked
from isthmus.cli import lab_sweep
from isthmus.cli.main import app
from isthmus.lab.sweeps.index import INDEX
from isthmus.lab.sweeps.record import METRICS

PAIRS = """experiment: noise-pair
base: {data: digits, examples: 100, test: 50, epochs: 2, batch: 10, width: 8, depth: 1}
grid: {lr: [0.1, 1000000]}
"""


def called(*words: str | Path) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["lab", *map(str, words)])
    # What the program prints of an error that it raises.
    error = "" if isinstance(result.exception, SystemExit | None) else str(result.exception)
    return result.exit_code, result.output + error


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    (folder / "sweep.yaml").write_text(PAIRS)
    code, said = called("sweep", folder / "sweep.yaml", "-o", folder / "out", "--workers", "1")
    assert code == 0, said
    assert "2 of 2 runs, 1 diverged" in said
    return folder / "out"


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "out"))


def test_the_table_shows_gains_and_fits(done: Path) -> None:
    code, said = called("runs", done)
    assert code == 0
    assert "figures have no room here; --csv has them" in said
    heading, *rows = [line for line in said.splitlines() if " done " in line or " run " in line]
    assert "gain" in said
    assert len(rows) == 1
    assert max(map(len, said.splitlines())) <= 80
    # No cell is folded: the rows have as many words as columns.
    assert len(rows[0].split()) >= len(heading.split())
    assert "2 runs are over" in said


def test_csv_has_everything(done: Path) -> None:
    code, said = called("runs", done, "--csv")
    assert code == 0
    first, second = csv.DictReader(io.StringIO(said))
    assert first["status"] == "done"
    assert {"lr", "gain", "barrier", "merged_training_loss", "curves"} <= set(first)
    assert second["status"] == "diverged"
    assert second["gain"] == ""


@pytest.mark.parametrize("how", ["damaged", "lost"])
def test_without_an_index_the_runs_are_shown_all_the_same(how: str, copy: Path) -> None:
    if how == "lost":
        (copy / INDEX).unlink()
    else:
        (copy / INDEX).write_bytes(b"none")
    with locked(copy, "somebody holds"):
        code, said = called("runs", copy)
        assert code == 0
        assert "2 runs are over" in said
    assert called("runs", copy, "--rebuild")[0] == 0
    assert (copy / INDEX).read_bytes().startswith(b"SQLite")


def test_failed_runs_are_named_with_their_errors_and_counted_as_an_error(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "experiment: training\nbase: {data: digit, epochs: 1}\nseeds: [0, 1]\n"
    )
    code, said = called("sweep", tmp_path / "s.yaml", "-o", tmp_path / "out", "--workers", "1")
    assert code == 1
    assert "2 of 2 runs failed" in said
    assert "--retry-failed" in said
    code, said = called("runs", tmp_path / "out")
    assert code == 0
    assert said.count("failed: there is no data set 'digit'") == 2


def test_after_ctrl_c_the_way_on_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "s.yaml").write_text(PAIRS)
    monkeypatch.setattr(lab_sweep, "run_sweep", stopped)
    monkeypatch.setattr(lab_sweep, "listen_to_kill", lambda: None)
    code, said = called("sweep", tmp_path / "s.yaml", "-o", tmp_path / "out")
    assert code == 130
    assert "The same command goes on" in said


def test_infinite_rates_and_files_that_are_no_mapping(tmp_path: Path) -> None:
    for text, words in (
        ("experiment: training\nbase: {lr: .inf}\n", "lr is inf"),
        ("- training\n", "a sweep is a mapping"),
    ):
        (tmp_path / "s.yaml").write_text(text)
        code, said = called("sweep", tmp_path / "s.yaml", "-o", tmp_path / "out")
        assert code == 1
        assert words in said
        assert not (tmp_path / "out").exists()


def test_a_folder_without_records_has_no_table(copy: Path) -> None:
    for path in copy.rglob(METRICS):
        path.unlink()
    code, said = called("runs", copy, "--rebuild")
    assert (code, said.strip()) == (0, "0 runs are over")
