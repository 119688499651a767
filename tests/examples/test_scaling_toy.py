"""The figure of the scaling toy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_it_draws_the_committed_figure(tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "toy.svg"
    subprocess.run([sys.executable, ROOT / "examples/scaling_toy.py", target], check=True)
    drawn = target.read_text("utf-8")
    for label in ("quotient mean", "means of the parameters", "slope ab"):
        assert label in drawn
        assert label in (ROOT / "docs/figures/scaling-toy.svg").read_text("utf-8")
