"""Matching by weights: how often a transformed copy comes back, and what it costs.

    python benchmarks/symmetry_matching.py [--model FOLDER]

Copies: random networks b = g a with a random element g, plus noise of half a's size in some rows; a copy
is recovered when it ends as near as the noise allows. "Free dimensions" is the first sweep of
`match_weights`, which goes out from inputs and outputs; "random order" leaves it out. Costs are
processor time of one thread and time on the clock, the load of the machine beside them. FOLDER is a
checkpoint with config.json and model.safetensors that is matched with a transformed copy of itself.
The result is benchmarks/results/symmetry_matching.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, machine
from safetensors.torch import load_file

from isthmus.symmetry.architectures import architecture_of
from isthmus.symmetry.matching import match_weights
from isthmus.symmetry.matrix_groups import Orthogonal
from isthmus.symmetry.monomial import Monomial
from isthmus.symmetry.spec import FREE, Spec, on

COPIES = 50
WIDTHS = (64, 128, 256, 512, 1024, 2048)
STREAMS = {
    "permutation": Monomial(64),
    "signed": Monomial(64, "sign"),
    "orthogonal": Orthogonal(64),
}
Network = tuple[Spec, dict[str, tuple[int, ...]]]


def residual(stream: str, ends: int) -> Network:
    """Six blocks of 128 units on a stream of 64, with `ends` inputs and outputs."""
    reads = on("stream", "dual")
    axes = {"stream": STREAMS[stream], **{f"hidden{i}": Monomial(128) for i in range(6)}}
    tensors = {"in": (on("stream"), FREE), "out": (FREE, reads)}
    shapes = {"in": (64, ends), "out": (ends, 64)}
    for i in range(6):
        tensors |= {f"{i}.up": (on(f"hidden{i}"), reads)}
        tensors |= {f"{i}.down": (on("stream"), on(f"hidden{i}", "dual"))}
        shapes |= {f"{i}.up": (128, 64), f"{i}.down": (64, 128)}
    return Spec(axes, tensors), shapes


def chain(width: int) -> Network:
    """64 inputs, three ReLU layers, 10 outputs."""
    widths = (64, width, width, width, 10)
    axes = {f"h{i}": Monomial(width, "positive") for i in range(3)}
    tensors, shapes = {}, {}
    for i in range(4):
        writes = on(f"h{i}") if i < 3 else FREE
        reads = on(f"h{i - 1}", "dual") if i else FREE
        tensors |= {f"{i}.weight": (writes, reads), f"{i}.bias": (writes,)}
        shapes |= {f"{i}.weight": (widths[i + 1], widths[i]), f"{i}.bias": (widths[i + 1],)}
    return Spec(axes, tensors), shapes


def drawn(
    shapes: dict[str, tuple[int, ...]], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    return {
        name: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }


def recovered(network: Network, noise: float, *, free: bool) -> dict[str, Any]:
    """How many of `COPIES` copies come back, and how many sweeps that takes."""
    spec, shapes = network
    count, sweeps, distances = 0, [], []
    for seed in range(COPIES):
        generator = torch.Generator().manual_seed(seed)
        a, other = drawn(shapes, generator), drawn(shapes, generator)
        near = {name: a[name] + noise * other[name] for name in a}
        found = match_weights(
            spec,
            a,
            spec.act(spec.random(generator), near),
            start=None if free else spec.identity(),
            seed=seed,
        )
        count += found.distance < 1e-4 + 1.1 * noise
        sweeps.append(found.sweeps)
        distances.append(found.distance)
    return {
        "recovered": count,
        "of": COPIES,
        "sweeps": round(statistics.mean(sweeps), 1),
        "distance": round(statistics.mean(distances), 4),
    }


def cost(spec: Spec, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, Any]:
    load, cpu, clock = os.getloadavg()[0], time.process_time(), time.perf_counter()
    found = match_weights(spec, a, b)
    return {
        "cpu": round(time.process_time() - cpu, 3),
        "wall": round(time.perf_counter() - clock, 3),
        "load before": round(load, 1),
        "sweeps": found.sweeps,
        "before": round(found.before, 4),
        "distance": float(f"{found.distance:.2g}"),
    }


def costs(width: int) -> dict[str, Any]:
    spec, shapes = chain(width)
    generator = torch.Generator().manual_seed(0)
    a, other = drawn(shapes, generator), drawn(shapes, generator)
    copy = spec.act(spec.random(generator), a)
    return {"width": width, "copy": cost(spec, a, copy), "unrelated": cost(spec, a, other)}


def checkpoint(folder: Path) -> dict[str, Any]:
    """A checkpoint against a transformed copy of itself, on all axes that its own form has."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    a = {name: x.float() for name, x in load_file(folder / "model.safetensors").items()}
    spec = architecture_of(config, {name: x.shape for name, x in a.items()}).spec
    b = spec.act(spec.random(torch.Generator().manual_seed(1)), a)
    return {"parameters": sum(x.numel() for x in a.values()), "copy": cost(spec, a, b)}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    arguments = parser.parse_args()
    result: dict[str, Any] = {"machine": machine(), "recovery": [], "cost": []}
    torch.set_num_threads(1)
    for ends in (32, 2):
        for stream in STREAMS:
            for noise in (0.0, 0.5):
                network = residual(stream, ends)
                row = {"stream": stream, "inputs and outputs": ends, "noise": noise}
                row["free dimensions"] = recovered(network, noise, free=True)
                row["random order"] = recovered(network, noise, free=False)
                result["recovery"].append(row)
                print(row, flush=True)
    for width in WIDTHS:
        result["cost"].append(costs(width))
        print(result["cost"][-1], flush=True)
    if arguments.model is not None:
        torch.set_num_threads(os.cpu_count() or 1)
        result["checkpoint"] = {"model": arguments.model.name, **checkpoint(arguments.model)}
        print(result["checkpoint"])
    out = RESULTS / "symmetry_matching.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
