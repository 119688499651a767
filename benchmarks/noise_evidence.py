"""What `isthmus advise` knows: writes src/isthmus/lab/noise/evidence.json from benchmarks/results/lab-noise-*.json.

Run: python benchmarks/noise_evidence.py, after `isthmus lab noise` and copying its results.json there.
"""

from __future__ import annotations

import json
from pathlib import Path

from isthmus.lab.noise.evidence import gathered

ROOT = Path(__file__).parents[1]

if __name__ == "__main__":
    files = [
        path
        for kind in ("text", "transfer", "pairs")
        if (path := ROOT / "benchmarks/results" / f"lab-noise-{kind}.json").exists()
    ]
    found = gathered(
        (str(path.relative_to(ROOT)), json.loads(path.read_text(encoding="utf-8")))
        for path in files
    )
    content = found.model_dump_json(indent=1) + "\n"
    (ROOT / "src/isthmus/lab/noise/evidence.json").write_text(content, encoding="utf-8")
