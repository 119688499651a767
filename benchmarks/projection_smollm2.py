"""Time and memory of a projection of three real experts of SmolLM2-135M, calibration included.

    isthmus lab projection --experiment smollm2 --seeds 0     # trains the experts, once
    python benchmarks/projection_smollm2.py [--sequential] [--cache .cache]

Each expert is calibrated on 128 examples of 256 tokens of its own domain: texts are joined, so that every
example has all of them. The result is added to benchmarks/results/projection_smollm2.json.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

import yaml
from measure import BIN, RESULTS, machine, measure

DOMAINS = ("films", "news", "e-mail")
EXAMPLES, TOKENS, CHARACTERS = 128, 256, 2500


def examples(source: Path, target: Path) -> None:
    """Texts joined until they are long enough for `TOKENS` tokens, as often as they last, then anew."""
    texts = [
        json.loads(line)["text"]
        for file in sorted(source.rglob("*.jsonl"))
        for line in file.read_text(encoding="utf-8").splitlines()
    ]
    made, at = [], 0
    while len(made) < EXAMPLES:
        # A number keeps examples apart where the texts begin again.
        joined = f"{len(made)}."
        while len(joined) < CHARACTERS:
            joined += " " + texts[at % len(texts)]
            at += 1
        made.append(json.dumps({"text": joined}))
    target.write_text("\n".join(made) + "\n", encoding="utf-8")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    parser.add_argument("--sequential", action="store_true")
    arguments = parser.parse_args()
    kept = arguments.cache / "lab-projection" / "language"
    seed = kept / "of-smollm2" / "seed-0"
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for domain in DOMAINS:
            examples(seed / "calibration" / domain, root / f"{domain}.jsonl")
        recipe = {
            "merge_method": "projection",
            "base_model": str((kept / "smollm2").resolve()),
            "models": [
                {
                    "model": str((seed / "experts" / domain).resolve()),
                    "calibration": {
                        "data": str(root / f"{domain}.jsonl"),
                        "examples": EXAMPLES,
                        "tokens": TOKENS,
                    },
                }
                for domain in DOMAINS
            ],
            "parameters": {"basis": "diagonal", "sequential": arguments.sequential},
            "dtype": "float32",
        }
        (root / "recipe.yml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
        load = os.getloadavg()[0]
        usage = measure([BIN / "isthmus", "merge", root / "recipe.yml", root / "merged"])
        report = json.loads((root / "merged" / "projection.json").read_text(encoding="utf-8"))
    result = {
        "machine": machine(),
        "experts": len(DOMAINS),
        "examples": EXAMPLES,
        "tokens": TOKENS,
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
        **usage.as_data(),
        "captured": report["captured"],
    }
    out = RESULTS / "projection_smollm2.json"
    known = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    known["in sequence" if arguments.sequential else "layer by layer"] = result
    out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
