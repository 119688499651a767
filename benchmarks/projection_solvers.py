"""Many small box programmes: the batched active-set method against a loop of scipy's lsq_linear.

    python benchmarks/projection_solvers.py

min ‖Fd + r‖² with 0 ≤ d ≤ 1 in every block, F of shape [8, 4]: the row programmes of four experts. Isthmus
solves all blocks, on one thread, from FᵀF and Fᵀr; scipy solves a sample, from F and r. Compilation is not
timed. Both answers are compared on the sample.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import numpy as np
import scipy
import torch
from measure import RESULTS, machine
from scipy.optimize import lsq_linear

from isthmus.projection.constraints import FREE, NON_NEGATIVE, SIMPLEX, Constraint, box
from isthmus.projection.quadratic import BlockQuadratic
from isthmus.projection.solve import solve

ROWS, EXPERTS = 8, 4
SEEDS = (0, 1, 2)
CONSTRAINTS = {"none": FREE, "box [0, 1]": box(), "non-negative": NON_NEGATIVE, "simplex": SIMPLEX}
ALIKE = {"independent": 0.0, "alike": 0.999}
"""Cosine of the experts' outputs: experts that are alike make ill-conditioned programmes."""


def programmes(blocks: int, cosine: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """F, shape [N, 8, 4], and r, shape [N, 8]."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    common, own = normal(blocks, ROWS, 1), normal(blocks, ROWS, EXPERTS)
    return cosine**0.5 * common + (1 - cosine) ** 0.5 * own, normal(blocks, ROWS)


def ours(f: torch.Tensor, r: torch.Tensor, constraint: Constraint) -> dict[str, Any]:
    """Seconds, and how good the answers are."""
    linear = (f.mT @ r.unsqueeze(-1)).squeeze(-1)
    quadratic = BlockQuadratic(f.mT @ f, linear, r.square().sum(dim=1))
    load = os.getloadavg()[0]
    start = time.perf_counter()
    found = solve(quadratic, constraint)
    seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 3),
        "residual": found.residual,
        "converged": found.converged,
        "steps": found.iterations,
        "load": round(load, 2),
        "solution": found.coefficients,
    }


def theirs(f: torch.Tensor, r: torch.Tensor, method: str) -> tuple[float, np.ndarray]:
    """Seconds for the loop, and the answers."""
    left, right = f.numpy(), -r.numpy()
    # By default bvls stops after as many steps as there are unknowns, solved or not.
    start = time.perf_counter()
    answers = [
        lsq_linear(a, b, (0, 1), method=method, tol=1e-12, max_iter=100).x
        for a, b in zip(left, right, strict=True)
    ]
    return time.perf_counter() - start, np.array(answers)


def contest(blocks: int, sample: int, cosine: float) -> dict[str, Any]:
    """All constraints, and scipy where it has the constraint."""
    solve(
        BlockQuadratic(torch.eye(4).double()[None], torch.ones(1, 4).double(), torch.ones(1)), box()
    )
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in CONSTRAINTS}
    peers: dict[str, list[dict[str, Any]]] = {"bvls": [], "trf": []}
    for seed in SEEDS:
        f, r = programmes(blocks, cosine, seed)
        for name, constraint in CONSTRAINTS.items():
            found = ours(f, r, constraint)
            solution = found.pop("solution")
            rounds[name].append(found)
            if name != "box [0, 1]":
                continue
            for method, of_method in peers.items():
                seconds, answers = theirs(f[:sample], r[:sample], method)
                gap = np.abs(answers - solution[:sample].numpy()).max()
                of_method.append(
                    {
                        "sample": sample,
                        "seconds": round(seconds, 3),
                        "for_all": round(seconds / sample * blocks, 1),
                        "largest_difference": float(gap),
                    }
                )
    return {"isthmus": rounds, "scipy": peers}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Time the small constrained programmes.")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--sample", type=int, default=1000, help="programmes for scipy")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        "machine": machine() | {"scipy": scipy.__version__},
        "blocks": options.blocks,
        "shape": [ROWS, EXPERTS],
        "contests": {
            name: contest(options.blocks, options.sample, cosine) for name, cosine in ALIKE.items()
        },
    }
    path = RESULTS / "projection_solvers.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results["contests"], indent=1))


if __name__ == "__main__":
    main()
