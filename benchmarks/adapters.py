"""Times merges of LoRA adapters against PEFT and against KnOTS as published, and a 7B-shaped set.

    python benchmarks/adapters.py            everything, about half an hour
    python benchmarks/adapters.py --quick    small matrices, a minute, prints only

Every contender runs in a process of its own, one after the other, on the same four random adapters
of one linear layer; the time is that of the merge itself, without imports and files, the best of
six or more where it is short. The 7B-shaped sets are merged by the command, files and all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from measure import BIN, RESULTS, machine, measure

OUTPUT = RESULTS / "adapters.json"
RANK, ADAPTERS = 16, 4
LONG, AT_LEAST = 20.0, 5.0
"""Seconds. What takes less than LONG runs six times or for AT_LEAST in all, the first unheated."""


Contender = tuple[Callable[[], Any], Callable[[Any], Any]]


def factors(size: int, seed: int) -> list[tuple[Any, Any]]:
    """B and A of every adapter: random, of the magnitude of trained ones."""
    import torch

    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, RANK, generator=draw) * 0.02,
            torch.randn(RANK, size, generator=draw) / size**0.5,
        )
        for _ in range(ADAPTERS)
    ]


def settings(method: str, **shared: Any) -> Any:
    """A method's defaults with weight 1/4 and density 0.2."""
    from isthmus.methods.method import Settings
    from isthmus.methods.parameters import Scope
    from isthmus.methods.registry import get_method

    given = {"weight": 1 / ADAPTERS, "density": 0.2} | shared
    values = {p.name: given.get(p.name, p.default) for p in get_method(method).parameters}
    scopes = {p.name: p.scope for p in get_method(method).parameters}
    return Settings(
        {name: value for name, value in values.items() if scopes[name] is Scope.GLOBAL},
        {
            name: (value,) * ADAPTERS
            for name, value in values.items()
            if scopes[name] is not Scope.GLOBAL
        },
    )


def isthmus(pairs: list[tuple[Any, Any]], method: str, space: str, rank: int) -> Contender:
    """A merge by Isthmus."""
    from isthmus.geometry.factored import Factored
    from isthmus.methods.adapters import merge_updates
    from isthmus.methods.registry import get_method

    updates = [Factored(b, a) for b, a in pairs]
    chosen = settings(method)
    return (
        lambda: merge_updates(get_method(method), updates, chosen, space=space, rank=rank),
        lambda merged: merged.update.matrix(),
    )


def with_peft(pairs: list[tuple[Any, Any]], combination: str) -> Contender:
    """A merge by PEFT's `add_weighted_adapter`."""
    import torch
    from peft import LoraConfig, get_peft_model

    size = pairs[0][0].shape[0]
    base = torch.nn.Sequential(torch.nn.Linear(size, size, bias=False))
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules=["0"])
    model = get_peft_model(base, config, adapter_name="a0")
    names = [f"a{k}" for k in range(ADAPTERS)]
    for name in names[1:]:
        model.add_adapter(name, config)
    layer = model.base_model.model[0]
    for name, (b, a) in zip(names, pairs, strict=True):
        layer.lora_A[name].weight.data.copy_(a)
        layer.lora_B[name].weight.data.copy_(b)

    def merge() -> str:
        if "merged" in model.peft_config:
            model.delete_adapter("merged")
        more = {"density": 0.2} if combination == "ties_svd" else {}
        model.add_weighted_adapter(
            names, [1 / ADAPTERS] * ADAPTERS, "merged", combination_type=combination,
            svd_rank=RANK, **more,
        )  # fmt: skip
        return "merged"

    return merge, lambda name: layer.get_delta_weight(name).double()


def knots_by_full_svd(pairs: list[tuple[Any, Any]]) -> Contender:
    """KnOTS with linear as published: the SVD of all updates side by side, in float64."""
    import torch

    def merge() -> Any:
        dense = torch.cat([b.double() @ a.double() for b, a in pairs], dim=1)
        u, s, vh = torch.linalg.svd(dense, full_matrices=False)
        kept = s > 1e-5 * s[0]
        blocks = torch.stack((s[kept, None] * vh[kept]).chunk(ADAPTERS, dim=1))
        return u[:, kept] @ blocks.mean(dim=0)

    return merge, lambda merged: merged


def contender(name: str, size: int) -> Contender:
    """One of the merges, ready to run, and what makes a matrix of its result."""
    pairs = factors(size, seed=size)
    total = RANK * ADAPTERS
    makers: dict[str, Callable[[], Contender]] = {
        "linear, isthmus": lambda: isthmus(pairs, "linear", "core", RANK),
        "linear, peft svd": lambda: with_peft(pairs, "svd"),
        "ties, isthmus in core": lambda: isthmus(pairs, "ties", "core", RANK),
        "ties, isthmus in knots": lambda: isthmus(pairs, "ties", "knots", RANK),
        "ties, isthmus in full": lambda: isthmus(pairs, "ties", "full", RANK),
        "ties, peft ties_svd": lambda: with_peft(pairs, "ties_svd"),
        "knots linear, isthmus": lambda: isthmus(pairs, "linear", "knots", total),
        "knots ties, isthmus": lambda: isthmus(pairs, "ties", "knots", total),
        "knots linear, full SVD": lambda: knots_by_full_svd(pairs),
    }
    return makers[name]()


CONTESTS = {
    "linear": ["linear, isthmus", "linear, peft svd"],
    "knots": ["knots linear, isthmus", "knots ties, isthmus", "knots linear, full SVD"],
    "ties": [
        "ties, isthmus in core",
        "ties, isthmus in knots",
        "ties, isthmus in full",
        "ties, peft ties_svd",
    ],
}
SAME = [
    ("linear, isthmus", "linear, peft svd"),
    ("knots linear, isthmus", "knots linear, full SVD"),
]
"""Pairs that compute the same."""


def child(*arguments: object) -> str:
    """Run this file once more: what is measured later must not start from a large parent."""
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def compare(ours: str, theirs: str) -> None:
    """Print the relative difference of two results."""
    import torch

    one, two = (torch.load(path, weights_only=True) for path in (ours, theirs))
    print(float((one - two).norm() / two.norm()))


def run_one(name: str, size: int, result: Path) -> None:
    """In a process of its own: time a contender and keep its result."""
    import torch

    merge, dense = contender(name, size)
    times: list[float] = []
    while not times or (times[0] < LONG and (len(times) < 6 or sum(times) < AT_LEAST)):
        begin = time.perf_counter()
        merged = merge()
        times.append(time.perf_counter() - begin)
    torch.save(dense(merged), result)
    print(json.dumps({"seconds": min(times), "runs": len(times)}))


def contest(size: int, contests: Sequence[str]) -> dict[str, Any]:
    """The contenders on one size, and how far those that compute the same agree."""
    found: dict[str, Any] = {"load": round(os.getloadavg()[0], 2)}
    with tempfile.TemporaryDirectory() as folder:
        paths = {}
        for which in contests:
            for name in CONTESTS[which]:
                paths[name] = Path(folder) / f"{len(paths)}.pt"
                found[name] = json.loads(child("--one", name, size, paths[name]).splitlines()[-1])
                print(f"{size}: {name}: {found[name]}", flush=True)
        for ours, theirs in (pair for pair in SAME if pair[0] in paths):
            shown = child("--compare", paths[ours], paths[theirs])
            found[ours]["error"] = float(shown.splitlines()[-1])
    return found


def write_set(
    folder: Path, adapters: int, rank: int, layers: int, size: int, related: bool
) -> None:
    """Adapters of four modules in every layer; related ones vary about one, a quarter as large."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(0)
    names = [
        f"model.layers.{layer}.self_attn.{part}_proj" for layer in range(layers) for part in "qkvo"
    ]
    common = {
        (name, part): torch.randn(*shape, generator=draw) * 0.02
        for name in names
        for part, shape in (("A", (rank, size)), ("B", (size, rank)))
    }
    for number in range(adapters):
        draw = torch.Generator().manual_seed(1 + number)
        tensors = {}
        for (name, part), shared in common.items():
            own = torch.randn(*shared.shape, generator=draw) * 0.02
            key = f"base_model.model.{name}.lora_{part}.weight"
            tensors[key] = shared + own / 4 if related else own
        place = folder / str(number)
        place.mkdir(parents=True)
        save_file(tensors, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(
            json.dumps(
                {
                    "peft_type": "LORA",
                    "base_model_name_or_path": "seven-billion",
                    "r": rank,
                    "lora_alpha": rank,
                    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
                }
            )
        )


def whole_set(
    method: str, adapters: int, rank: int, *, layers: int, size: int, related: bool
) -> dict[str, Any]:
    """Merge a whole set by the command."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        child("--write", folder / "adapters", adapters, rank, layers, size, int(related))
        lines = [f"merge_method: {method}", "models:"]
        lines += [f"  - model: {folder / 'adapters' / str(k)}" for k in range(adapters)]
        lines += ["parameters: {weight: 1.0}"]
        recipe = folder / "recipe.yaml"
        recipe.write_text("\n".join(lines) + "\n")
        load = round(os.getloadavg()[0], 2)
        usage = measure([BIN / "isthmus", "merge", recipe, folder / "out"])
        manifest = json.loads((folder / "out" / "isthmus-manifest.json").read_text())
    found = {
        "method": method,
        "related": related,
        "adapters": adapters,
        "rank": rank,
        "layers": layers,
        "size": size,
        "notes": [note[:200] for note in manifest["notes"]],
        "load": load,
        **usage.as_data(),
    }
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Time merges of adapters.")
    parser.add_argument("--quick", action="store_true", help="small; prints only")
    parser.add_argument("--sizes", nargs="*", type=int, default=[2048, 4096])
    parser.add_argument("--contests", nargs="*", default=list(CONTESTS), choices=CONTESTS)
    parser.add_argument("--no-sets", action="store_true", help="leave out the 7B-shaped sets")
    parser.add_argument("--no-contests", action="store_true", help="only the 7B-shaped sets")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--compare", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--write", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.compare:
        compare(*options.compare)
        return
    if options.write:
        folder, *numbers = options.write
        adapters, rank, layers, size, related = map(int, numbers)
        write_set(Path(folder), adapters, rank, layers, size, bool(related))
        return
    if options.one:
        run_one(options.one[0], int(options.one[1]), Path(options.one[2]))
        return
    layers, size = (2, 256) if options.quick else (32, 4096)
    results: dict[str, Any] = {}
    if OUTPUT.exists() and not options.quick:
        results = json.loads(OUTPUT.read_text(encoding="utf-8"))

    def save() -> None:
        if not options.quick:
            OUTPUT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    results["machine"] = machine()
    sizes = [256] if options.quick else options.sizes
    for one in () if options.no_contests else sizes:
        of_size = results.setdefault("contests", {}).setdefault(str(one), {})
        of_size |= contest(one, options.contests)
        save()
    if not options.no_sets:
        grid = [(6, 16), (2, 16), (4, 16), (6, 4), (6, 8)]
        results["sets"] = [
            whole_set("geomerge", k, r, layers=layers if (k, r) == (6, 16) else layers // 8 or 1,
                      size=size, related=related)
            for related in (True, False)
            for k, r in grid
        ]  # fmt: skip
        results["sets"].append(whole_set("linear", 6, 16, layers=layers, size=size, related=False))
        save()


if __name__ == "__main__":
    main()
