"""Two-layer ReLU networks: writes benchmarks/results/two-layer.json. Run: python benchmarks/two_layer.py"""

from __future__ import annotations

import tempfile
from pathlib import Path

from isthmus.lab.two_layer import run_two_layer

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run_two_layer(Path(folder))
        results = Path(folder, "results.json").read_text(encoding="utf-8")
    Path(__file__).with_name("results").joinpath("two-layer.json").write_text(
        results, encoding="utf-8"
    )
