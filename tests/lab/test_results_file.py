"""What an experiment writes tells nothing of the machine that it ran on."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

from isthmus.lab.results_file import write_results


def test_folders_of_this_machine_do_not_show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    packages, here = sysconfig.get_path("purelib"), Path.cwd()
    values = {
        "base": f"{packages}/some_model/weights",
        "expert": str(here / "cache" / "ä"),
        "notes": [f"copied from {packages}/some_model/weights, an integer: x"],
        "score": 0.5,
    }
    write_results(tmp_path / "results.json", values)
    text = (tmp_path / "results.json").read_text("utf-8")
    assert json.loads(text) == {
        "base": "site-packages/some_model/weights",
        "expert": "./cache/ä",
        "notes": ["copied from site-packages/some_model/weights, an integer: x"],
        "score": 0.5,
    }
    assert text.endswith("}\n")
