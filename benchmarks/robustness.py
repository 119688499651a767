"""Kills merges at random moments and resumes them; merges with several workers. All must agree.

    python benchmarks/robustness.py

For each method: a merge that nobody disturbs, the same with more workers, and merges that die by
kill -9 at a random moment after the first byte was written, and go on with --resume. Every file of
every output, the manifest included, must hold the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from engine import Bench
from measure import BIN, RESULTS, ROOT, machine

METHODS = ("linear", "ties", "dare_ties")
WORKERS = (1, 2, 4)
SHAPE = "60M"


def start(recipe: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    """Begin a merge with small shards."""
    return subprocess.Popen(
        [BIN / "isthmus", "merge", recipe, out, "--max-shard-size", "20MB", *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for_journal(process: subprocess.Popen[bytes], out: Path) -> None:
    """Return when a merge has begun to write, or has ended."""
    while process.poll() is None and not journal_of(out).exists():
        time.sleep(0.002)


def journal_of(out: Path) -> Path:
    """Where a merge lists the tensors that it has written; gone when it is done."""
    return out / ".isthmus" / "journal.jsonl"


def finish(recipe: Path, out: Path, *more: str) -> float:
    """Merge to the end; the seconds that it wrote."""
    process = start(recipe, out, *more)
    wait_for_journal(process, out)
    begin = time.perf_counter()
    if process.wait():
        raise RuntimeError(f"the merge of {recipe.name} failed")
    return time.perf_counter() - begin


def fingerprint(out: Path) -> dict[str, str]:
    """The hash of every file below a folder."""
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


def write_recipe(bench: Bench, method: str) -> Path:
    """The recipe has a name: without one the model card would carry the folder's."""
    base, *experts = bench.family(SHAPE)
    lines = [f"name: {method}", f"merge_method: {method}", f"base_model: {base}"]
    density = "" if method == "linear" else ", density: 0.3"
    lines += [f"parameters: {{weight: 0.5{density}}}", "seed: 7", "models:"]
    lines += [f"  - model: {path}" for path in experts]
    path = bench.folder / f"robustness-{method}.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def kill_and_resume(recipe: Path, out: Path, delay: float) -> dict[str, Any]:
    """Kill a merge some seconds after its first byte, look how far it came, and finish it."""
    process = start(recipe, out)
    wait_for_journal(process, out)
    time.sleep(delay)
    process.kill()
    killed = process.wait() != 0
    journal = journal_of(out)
    journalled = journal.read_bytes().count(b'"tensors"') if journal.exists() else "moving"
    finish(recipe, out, "--resume")
    return {"delay": round(delay, 3), "killed": killed, "journalled": journalled}


def robustness(bench: Bench, method: str, kills: int) -> dict[str, Any]:
    """All that is done with one method."""
    recipe = write_recipe(bench, method)
    whole = bench.folder / "whole"
    other = bench.folder / "other"
    seconds = finish(recipe, whole, "--workers", "1")
    expected = fingerprint(whole)
    manifest = json.loads((whole / "isthmus-manifest.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = {
        "files": len(expected),
        "tensors": sum(len(file.get("tensors", ())) for file in manifest["files"].values()),
        "workers": {},
        "kills": [],
    }
    for workers in WORKERS:
        finish(recipe, other, "--workers", str(workers))
        found["workers"][str(workers)] = fingerprint(other) == expected
        shutil.rmtree(other)
    moments = random.Random(method)
    while len(found["kills"]) < kills:
        kill = kill_and_resume(recipe, other, moments.uniform(0, seconds))
        kill["identical"] = fingerprint(other) == expected
        shutil.rmtree(other)
        # A merge that was done before the kill proves nothing.
        if kill["killed"]:
            found["kills"].append(kill)
            print(method, json.dumps(kill), flush=True)
    shutil.rmtree(whole)
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Kill and resume merges.")
    parser.add_argument("--kills", type=int, default=10, help="for each method")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "robustness")
    options = parser.parse_args()
    bench = Bench(options.folder.absolute())
    bench.folder.mkdir(parents=True, exist_ok=True)
    found = {method: robustness(bench, method, options.kills) for method in METHODS}
    shutil.rmtree(bench.folder)
    results = {"machine": machine(), "shape": SHAPE, "methods": found}
    (RESULTS / "robustness.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    failures = [
        method
        for method, of_method in found.items()
        if not all(of_method["workers"].values())
        or not all(kill["identical"] for kill in of_method["kills"])
    ]
    if failures:
        raise SystemExit(f"outputs differ: {', '.join(failures)}")
    print("all outputs are identical")


if __name__ == "__main__":
    main()
