"""Times the engine against mergekit, and against reading and writing alone.

    python benchmarks/engine.py            everything, about an hour
    python benchmarks/engine.py --quick    one small round, about a minute, prints only

Whole processes, one after the other in rounds (Isthmus, mergekit, Isthmus with one worker, floor;
and again), so that a noisy neighbour hits all of them. All inputs are in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measure import BIN, MERGEKIT_BIN, RESULTS, ROOT, Usage, machine, measure
from tables import contest_table, memory_table

METHODS = ("linear", "ties", "passthrough")
MODELS = 4
OUTPUT = RESULTS / "engine.json"


class Bench:
    """A folder with models, recipes and outputs.

    Args:
        folder: Is filled and emptied.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"

    def family(self, shape: str, models: int = MODELS) -> list[Path]:
        """Make a family, or find it; only the folders of `models` models are returned."""
        place = self.folder / "models" / shape.replace(", ", "-").replace(" ", "-")
        if not (place / str(models - 1)).exists():
            shutil.rmtree(place, ignore_errors=True)
            measure([sys.executable, Path(__file__).with_name("models.py"), place, shape,
                     "--models", str(models)])  # fmt: skip
        return [place / str(model) for model in range(models)]

    def drop(self, family: list[Path]) -> None:
        """Free the disk."""
        shutil.rmtree(family[0].parent)

    def recipe(self, method: str, family: list[Path]) -> Path:
        """A recipe that both tools read: the first model is the base, where there is one."""
        base, *experts = family
        lines = [f"merge_method: {method}"]
        if method == "ties":
            lines += [f"base_model: {base}", "parameters: {weight: 1.0, density: 0.2}"]
        elif method == "linear":
            lines += ["parameters: {weight: 1.0}"]
            experts = family
        else:
            experts = [base]
        lines += ["dtype: bfloat16", "models:", *(f"  - model: {path}" for path in experts)]
        path = self.folder / f"{method}-{len(family)}.yaml"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def isthmus(self, recipe: Path, workers: int, cache: Path | None = None) -> Usage:
        """Merge with Isthmus."""
        environment = {} if cache is None else {"NUMBA_CACHE_DIR": str(cache)}
        command = [BIN / "isthmus", "merge", recipe, self.out, "--workers", str(workers)]
        return self._clean(lambda: measure(command, environment))

    def mergekit(self, recipe: Path) -> Usage:
        """Merge with mergekit's defaults, without its progress bars; there is no tokenizer."""
        command = [MERGEKIT_BIN / "mergekit-yaml", recipe, self.out, "--quiet"]
        return self._clean(lambda: measure([*command, "--no-copy-tokenizer"]))

    def floor(self, inputs: list[Path]) -> Usage:
        """Read and write as many bytes."""
        files = [model / "model.safetensors" for model in inputs]
        size = files[0].stat().st_size
        command = [sys.executable, Path(__file__).with_name("floor.py"), self.out, str(size)]
        return self._clean(lambda: measure([*command, *files]))

    def _clean(self, run: Callable[[], Usage]) -> Usage:
        try:
            return run()
        finally:
            if self.out.is_dir():
                shutil.rmtree(self.out)
            else:
                self.out.unlink(missing_ok=True)


def contest(bench: Bench, shape: str, method: str, rounds: int) -> list[dict[str, Any]]:
    """Alternating rounds of one merge."""
    family = bench.family(shape)
    recipe = bench.recipe(method, family)
    inputs = family[:1] if method == "passthrough" else family
    # Fills the page cache.
    bench.floor(inputs)
    found = []
    for _ in range(rounds):
        load = round(os.getloadavg()[0], 2)
        usages = {
            "isthmus, 2 workers": bench.isthmus(recipe, 2),
            "mergekit": bench.mergekit(recipe),
            "isthmus, 1 worker": bench.isthmus(recipe, 1),
            "floor": bench.floor(inputs),
        }
        found.append({"load": load, **{name: usage.as_data() for name, usage in usages.items()}})
        print(f"{shape} {method}: {json.dumps(found[-1])}", flush=True)
    return found


def memory(bench: Bench) -> list[dict[str, Any]]:
    """Isthmus's peak memory by depth and number of models, base included."""
    rows = []
    for shape, layers, models in (
        ("220M", 12, 8),
        ("220M", 12, 2),
        ("220M", 12, 4),
        ("220M, 48 layers", 48, 4),
    ):
        family = bench.family(shape, models)
        peaks = {m: bench.isthmus(bench.recipe(m, family), 2).peak for m in ("linear", "ties")}
        size = sum((model / "model.safetensors").stat().st_size for model in family)
        rows.append({"layers": layers, "models": models, "input": size, **peaks})
        print(json.dumps(rows[-1]), flush=True)
    bench.drop(family)
    return sorted(rows, key=lambda row: (row["layers"], row["models"]))


def compilation(bench: Bench) -> dict[str, Any]:
    """The first merge with a trim ever, against the second: numba compiles one loop, then keeps it."""
    recipe = bench.recipe("ties", bench.family("tiny"))
    # What is measured later must find the loop compiled.
    bench.isthmus(recipe, 1)
    found: dict[str, Any] = {"first": [], "second": []}
    for _ in range(3):
        with tempfile.TemporaryDirectory() as cache:
            for usages in found.values():
                usages.append(bench.isthmus(recipe, 1, Path(cache)).as_data())
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Time the engine.")
    parser.add_argument("--shapes", nargs="*", default=["1.1B", "220M"])
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=METHODS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large-rounds", type=int, default=1, help="rounds for 1.1B")
    parser.add_argument("--no-memory", action="store_true", help="leave out the memory table")
    parser.add_argument("--quick", action="store_true", help="one small round; prints only")
    parser.add_argument("--keep", action="store_true", help="keep the models for the next time")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "benchmarks")
    options = parser.parse_args()
    if options.quick:
        options.shapes, options.methods = ["30M"], ("linear", "ties")
        options.rounds, options.no_memory = 1, True

    bench = Bench(options.folder.absolute())
    bench.folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"contests": {}}
    if OUTPUT.exists() and not options.quick:
        results = json.loads(OUTPUT.read_text(encoding="utf-8"))

    def save() -> None:
        if not options.quick:
            OUTPUT.parent.mkdir(parents=True, exist_ok=True)
            OUTPUT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    results["compilation"] = compilation(bench)
    save()
    if not options.no_memory:
        results["memory"] = {"machine": machine(), "rows": memory(bench)}
        save()
    for shape in options.shapes:
        rounds = options.large_rounds if shape == "1.1B" else options.rounds
        of_shape = results["contests"].setdefault(shape, {})
        for method in options.methods:
            of_shape[method] = {
                "machine": machine(),
                "rounds": contest(bench, shape, method, rounds),
            }
            save()
        if not options.keep:
            bench.drop(bench.family(shape))
    if not options.keep:
        shutil.rmtree(bench.folder)
    print(contest_table(results["contests"]))
    if "memory" in results:
        print(memory_table(results["memory"]["rows"]))


if __name__ == "__main__":
    main()
