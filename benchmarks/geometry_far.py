"""What the low-rank means do with adapters that share much, something, or nothing.

    python benchmarks/geometry_far.py

Random adapters B_k A_k of 1024 x 1024 weights, whose factors are a common trunk plus noise: trunk 3
(children of one fine-tune), 1 (half and half), 0 (unrelated tasks, nearly orthogonal spaces). For
each rank, number of adapters and distance: processor time on one thread, whether the mean
converged and its distances are certified, and how the merged update lies to the experts. Then the
time of one 4096 x 4096 module, of which a 7B model has 128 in its attention.
"""

from __future__ import annotations

import json
import statistics
import time
from itertools import product
from typing import Any

import torch
from measure import RESULTS, machine

from isthmus.geometry.factored import Factored, stacked
from isthmus.methods.adapters import merge_updates
from isthmus.methods.geomerge import GEOMERGE, NO_GEODESIC, UNCERTIFIED, UNSETTLED
from isthmus.methods.method import Settings

TRUNKS = (3.0, 1.0, 0.0)
RANKS = (4, 8, 16)
COUNTS = (2, 4, 6)
DISTANCES = ("canonical", "grassmann", "projection")
SEEDS = (0, 1)
SIZE = 1024
LARGE = 4096


def adapters(size: int, rank: int, count: int, trunk: float, seed: int) -> list[Factored]:
    """Updates whose singular values fall by a factor of about three from first to last."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    scales = torch.logspace(0, -0.5, rank, dtype=torch.float64)
    left, right = normal(size, rank), normal(rank, size)
    return [
        Factored((trunk * left + normal(size, rank)) * scales, trunk * right + normal(rank, size))
        for _ in range(count)
    ]


def inner(x: Factored, y: Factored) -> float:
    """The Frobenius inner product."""
    return float(((x.left.mT @ y.left) * (x.right @ y.right.mT)).sum())


def cosine(x: Factored, y: Factored) -> float:
    """Of the angle between two matrices."""
    return inner(x, y) / (inner(x, x) * inner(y, y)) ** 0.5


def merged(updates: list[Factored], rank: int, distance: str) -> tuple[Factored, set[str], float]:
    """The mean, what is said about it, and the seconds of processor time it took."""
    shared = {"distance": distance, "loss": "squared", "delta": None, "lambda": 1.0}
    settings = Settings(shared, {"weight": (1.0,) * len(updates)})
    begin = time.process_time()
    result = merge_updates(GEOMERGE, updates, settings, space=None, rank=rank)
    return result.update, set(result.notes), time.process_time() - begin


def row(rank: int, count: int, trunk: float) -> dict[str, Any]:
    """All distances on the same adapters; means over seeds."""
    found: dict[str, list[dict[str, float]]] = {d: [] for d in (*DISTANCES, "linear")}
    for seed in SEEDS:
        updates = adapters(SIZE, rank, count, trunk, seed)
        size = statistics.mean(inner(x, x) ** 0.5 for x in updates)
        results = {d: merged(updates, rank, d) for d in DISTANCES}
        linear = stacked(updates, [1 / count] * count).recompressed(rank)[0]
        results["linear"] = (linear, set(), 0.0)
        canonical = results["canonical"][0]
        for name, (update, notes, seconds) in results.items():
            found[name].append(
                {
                    "seconds": seconds,
                    "converged": float(not notes & {UNSETTLED, NO_GEODESIC}),
                    "certified": float(not notes & {UNSETTLED, NO_GEODESIC, UNCERTIFIED}),
                    "norm": inner(update, update) ** 0.5 / size,
                    "cosine": statistics.mean(cosine(update, x) for x in updates),
                    "least_cosine": min(cosine(update, x) for x in updates),
                    "to_canonical": cosine(update, canonical),
                }
            )
    means = {
        name: {key: round(statistics.mean(r[key] for r in runs), 4) for key in runs[0]}
        for name, runs in found.items()
    }
    return {"rank": rank, "adapters": count, "trunk": trunk, "distances": means}


def module(trunk: float) -> dict[str, float]:
    """Seconds of a module of a 7B model, six adapters of rank 16, one thread."""
    updates = adapters(LARGE, 16, 6, trunk, 0)
    seconds = min(merged(updates, 16, "canonical")[2] for _ in range(2))
    return {"trunk": trunk, "seconds": round(seconds, 3)}


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for rank, count, trunk in product(RANKS, COUNTS, TRUNKS):
        rows.append(row(rank, count, trunk))
        print(json.dumps(rows[-1]), flush=True)
    modules = [module(trunk) for trunk in TRUNKS]
    print(json.dumps(modules))
    text = json.dumps({"machine": machine(), "rows": rows, "modules": modules}, indent=1)
    (RESULTS / "geometry_far.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
