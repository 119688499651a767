"""Writing what an experiment found out, without saying where it lay on this machine."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_results(path: Path, values: Mapping[str, Any], *, indent: int = 2) -> None:
    """Write JSON in which installed packages and the current folder have no absolute paths.

    Args:
        path: The file.
        values: Plain values; recipes and notes among them name folders of models.
        indent: Of the JSON.
    """
    text = json.dumps(values, indent=indent)
    for folder, name in ((sysconfig.get_path("purelib"), "site-packages"), (str(Path.cwd()), ".")):
        # As JSON writes it.
        text = text.replace(json.dumps(folder)[1:-1] + "/", f"{name}/")
    path.write_text(text + "\n", encoding="utf-8")
