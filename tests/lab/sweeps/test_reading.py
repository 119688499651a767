"""Sweeps in files."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_toys import TOYS

from isthmus.errors import RecipeError
from isthmus.lab.sweeps.plan import Sweep
from isthmus.lab.sweeps.reading import read_sweep


def read(tmp_path: Path, text: str) -> Sweep:
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    return read_sweep(path, TOYS)


def test_a_grid_a_list_and_seeds(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "experiment: toy\nbase: {what: square}\ngrid: {x: [1, 2], seconds: [0.0, 0.5]}\n"
        "list: [{x: 7}]\nseeds: [3, 4]\n",
    )
    expected = [
        {"what": "square", "x": x, "seconds": seconds, "seed": seed}
        for x in (1, 2)
        for seconds in (0.0, 0.5)
        for seed in (3, 4)
    ]
    expected += [{"what": "square", "x": 7, "seed": seed} for seed in (3, 4)]
    assert found == Sweep("toy", tuple(expected))


def test_a_base_alone_is_one_run(tmp_path: Path) -> None:
    assert read(tmp_path, "experiment: toy\nbase: {x: 1}\n").runs == ({"x": 1},)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("experiment: toi\n", r"sweep\.yaml:1: there is no experiment 'toi'; did you mean 'toy'"),
        ("base: {}\n", "a sweep names its experiment"),
        ("experiment: toy\ngird: {}\n", r":2: unknown key 'gird'; did you mean 'grid'"),
        ("experiment: toy\ngrid: {x: 3}\n", "x must be a list of values"),
        ("experiment: toy\nlist: {x: 3}\n", "list must be a list"),
        ("experiment: toy\nlist: [3]\n", "every run of the list must be a mapping"),
        ("experiment: toy\nbase: [3]\n", "base must be a mapping"),
        ("experiment: toy\nbase:\n  y: 3\n", r":3: toy has no setting 'y'"),
        ("experiment: toy\ngrid:\n  x: [1, -2]\n", r":3: x is -2: Input should be greater"),
        (
            "experiment: toy\ngrid: {x: ["
            + ", ".join("1" * 400)
            + "], seed: ["
            + ", ".join("1" * 400)
            + "]}\n",
            "160,000 runs",
        ),
        ("", "is empty"),
        ("experiment: [toy\n", "not YAML"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=said):
        read(tmp_path, text)


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, "experiment: toy\nbase:\n  y: 3\n  x: -4\nseeds: [a]\n")
    for part in ("has no setting 'y'", "x is -4", "seed is 'a'"):
        assert part in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot be read"):
        read_sweep(tmp_path / "none.yaml")
