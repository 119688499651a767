"""docs/sweeps.md names every experiment and every setting, with its default."""

import re
from pathlib import Path

from isthmus.lab.sweeps.experiments import EXPERIMENTS

PAGE = (Path(__file__).parents[3] / "docs/sweeps.md").read_text("utf-8")


def test_every_experiment_has_its_row():
    section = PAGE[PAGE.index("## Experiments") : PAGE.index("## Settings")]
    assert re.findall(r"^\| `([\w-]+)` \|", section, re.M) == list(EXPERIMENTS)


def test_every_setting_has_its_row_and_its_default():
    section = PAGE[PAGE.index("## Settings") : PAGE.index("## The folder")]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| `([^`]+)` \|$", section, re.M))
    wanted = {
        name: str(field.default)
        for experiment in ("training", "noise-pair", "noise-transfer")
        for name, field in EXPERIMENTS[experiment].model().model_fields.items()
    }
    assert rows == wanted


def test_the_settings_of_the_text_experiment_are_named():
    section = PAGE[PAGE.index("`noise-text-transfer` has") : PAGE.index("## The folder")]
    for name in EXPERIMENTS["noise-text-transfer"].model().model_fields:
        assert f"`{name}`" in section
