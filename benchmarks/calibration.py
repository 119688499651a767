"""Calibration's time and memory, on random models of real shapes.

    python benchmarks/calibration.py [--only NAME ...]

Weights are drawn: what a run costs depends on shapes alone. Every measurement is a process of its own at
low priority; results are added to benchmarks/results/calibration.json as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import RESULTS, machine, measure
from models import SHAPES, Shape, write_family

OUT = RESULTS / "calibration.json"
TOKENS_OF_A_BATCH = 2048
MODELS = {
    "SmolLM2-135M": Shape(layers=30, width=576, inner=1536, key_value_heads=3, vocabulary=49_152),
    "1.1B": SHAPES["1.1B"],
    "1.1B, 2 blocks": Shape(layers=2, width=2048, inner=5632, key_value_heads=4),
}
WIDTHS = (577, 1537, 2049, 5633)


@dataclass(frozen=True)
class Work:
    """One measurement.

    Attributes:
        model: Its shape.
        examples: One number: `calibrate`. Several: `run_in_lockstep`, for each expert its number; merged
            model and experts are one file, and nothing is solved.
        tokens: Of each example.
    """

    model: str
    examples: tuple[int, ...]
    tokens: int

    @property
    def states(self) -> int:
        """Bytes of the activations that are kept between blocks."""
        networks = 1 if len(self.examples) == 1 else 2
        return networks * sum(self.examples) * self.tokens * MODELS[self.model].width * 4


WORKS = {
    "calibrate, SmolLM2-135M": Work("SmolLM2-135M", (128,), 256),
    "calibrate, 1.1B": Work("1.1B", (8,), 256),
    "calibrate, 2 blocks of 1.1B": Work("1.1B, 2 blocks", (128,), 256),
    "lockstep, SmolLM2-135M": Work("SmolLM2-135M", (128, 128, 128), 48),
    # All depth with few tokens, and little depth with a full batch for every expert.
    "lockstep, 1.1B": Work("1.1B", (1, 1, 1), 256),
    "lockstep, 2 blocks of 1.1B": Work("1.1B, 2 blocks", (8, 8, 8), 256),
}


def run(work: Work, folder: Path) -> dict[str, Any]:
    """In a process of its own: seconds by what they were spent on."""
    import torch

    from isthmus.checkpoints import open_checkpoint
    from isthmus.models import lockstep
    from isthmus.models.calibration import calibrate_checkpoint
    from isthmus.models.network import Weights
    from isthmus.projection.statistics import InputMoments

    spent = {"moments": 0.0, "weights": 0.0}
    _timed(InputMoments, "add", spent, "moments")
    _timed(Weights, "_read", spent, "weights")
    if len(work.examples) > 1:
        _timed(lockstep, "_add_cross", spent, "moments")
    draw = torch.Generator().manual_seed(0)
    size = max(1, TOKENS_OF_A_BATCH // work.tokens)
    batches = [
        [
            {"input_ids": part}
            for part in torch.randint(
                3, MODELS[work.model].vocabulary, (count, work.tokens), generator=draw
            ).split(size)
        ]
        for count in work.examples
    ]
    load = os.getloadavg()[0]
    start = time.perf_counter()
    with open_checkpoint(str(folder)) as model:
        if len(batches) == 1:
            for _ in calibrate_checkpoint(model, batches[0]):
                pass
        else:
            lockstep.run_in_lockstep(model, [model] * len(batches), batches, lambda _shared: None)
    seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 1),
        **{f"seconds_{key}": round(value, 1) for key, value in spent.items()},
        "seconds_forward": round(seconds - sum(spent.values()), 1),
        "load_before": round(load, 2),
        "load_after": round(os.getloadavg()[0], 2),
    }


def grams() -> list[dict[str, Any]]:
    """Seconds to add 2048 inputs of float32, one thread: the whole product, and its half."""
    import torch
    from scipy.linalg.blas import dsyrk
    from threadpoolctl import threadpool_limits

    rows = []
    with threadpool_limits(1):
        torch.set_num_threads(1)
        for n in WIDTHS:
            x = torch.randn(TOKENS_OF_A_BATCH, n)
            gram = torch.zeros(n, n, dtype=torch.float64)

            def whole(x: Any = x, gram: Any = gram) -> None:
                wide = x.double()
                gram.addmm_(wide.mT, wide)

            def half(x: Any = x, gram: Any = gram) -> None:
                wide = x.double().numpy().T
                dsyrk(1.0, wide, 1.0, gram.numpy().T, lower=1, overwrite_c=1)

            seconds: dict[str, list[float]] = {"addmm_": [], "dsyrk": []}
            for _ in range(6):
                for name, function in (("addmm_", whole), ("dsyrk", half)):
                    # Of this thread: others use the machine too.
                    start = time.thread_time()
                    function()
                    seconds[name].append(time.thread_time() - start)
            best = {name: round(min(times), 4) for name, times in seconds.items()}
            rows.append({"inputs": n, **best})
    return rows


def _timed(owner: Any, name: str, spent: dict[str, float], key: str) -> None:
    plain = getattr(owner, name)

    def timed(*arguments: Any, **keywords: Any) -> Any:
        start = time.perf_counter()
        try:
            return plain(*arguments, **keywords)
        finally:
            spent[key] += time.perf_counter() - start

    setattr(owner, name, timed)


def record(name: str, result: Any) -> None:
    """Add to the file of results."""
    known = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else {}
    known |= {"machine": machine(), name: result}
    OUT.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: result}), flush=True)


@contextmanager
def written(model: str, root: Path) -> Iterator[Path]:
    """The model's folder, as long as the context lasts."""
    folder = root / model.replace(" ", "_")
    write_family(folder, MODELS[model], 1)
    try:
        yield folder / "0"
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """The command."""
    names = ["grams", *WORKS]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--work", choices=names, help="used for the processes that are measured")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.work:
        os.nice(15)
        name = arguments.work
        result = grams() if name == "grams" else run(WORKS[name], arguments.folder)
        arguments.out.write_text(json.dumps(result), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory() as temporary:
        root, out = Path(temporary), Path(temporary) / "result.json"
        command = [sys.executable, __file__, "--out", out, "--work"]
        for name in arguments.only:
            if name == "grams":
                measure([*command, name])
                record(name, json.loads(out.read_text(encoding="utf-8")))
                continue
            work = WORKS[name]
            with written(work.model, root) as folder:
                usage = measure([*command, name, "--folder", folder])
            full = Work(work.model, tuple(128 for _ in work.examples), 256)
            figures = json.loads(out.read_text(encoding="utf-8"))
            record(
                name,
                {
                    "examples": work.examples,
                    "tokens": work.tokens,
                    **figures,
                    "cpu": round(usage.cpu, 1),
                    "peak": usage.peak,
                    "peak_with_128_x_256": usage.peak + full.states - work.states,
                },
            )


if __name__ == "__main__":
    main()
