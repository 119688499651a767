"""Runs in mergekit's own environment: one line of JSON asks, one line of JSON answers.

One process for all merges, since importing mergekit takes longer than any of them. The merges go
through the functions behind the commands `mergekit-yaml` and `mergekit-pytorch`.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import torch
from mergekit import merge_methods
from mergekit.merge_methods.base import TensorGroup
from mergekit.scripts.merge_raw_pytorch import main as mergekit_pytorch
from mergekit.scripts.run_yaml import main as mergekit_yaml


def merge_folders(recipe: str, out: str) -> None:
    mergekit_yaml.main([recipe, out, "--quiet"], standalone_mode=False)


def merge_files(recipe: str, out: str) -> None:
    mergekit_pytorch.main([recipe, out, "--quiet", "--tensor-intersection"], standalone_mode=False)


def draw(method: str, inputs: str, out: str, density: float, rescale: bool, count: int) -> None:
    """Merge one tensor with `count` seeds; write the results, shape [count, n]."""
    with np.load(inputs) as arrays:
        base, experts = torch.from_numpy(arrays["base"]), torch.from_numpy(arrays["experts"])
        weights = arrays["weights"].tolist()
    group = TensorGroup.from_tensors([base, *experts], base_index=0)
    ids = [entry.id for entry in group.non_base]
    drawn = []
    for seed in range(count):
        torch.manual_seed(seed)
        merged = merge_methods.get(method).merge_group(
            group,
            weight=dict(zip(ids, weights, strict=True)),
            density=dict.fromkeys(ids, density),
            rescale=rescale,
            normalize=False,
            int8_mask=False,
            **{"lambda": 1.0},
        )
        drawn.append(merged.numpy())
    np.save(out, np.stack(drawn))


COMMANDS = {"folders": merge_folders, "files": merge_files, "draw": draw}


def main() -> None:
    # Whatever mergekit prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(
        json.dumps({"torch": torch.__version__, "numpy": np.__version__}), file=answers, flush=True
    )
    for line in sys.stdin:
        request = json.loads(line)
        try:
            COMMANDS[request.pop("command")](**request)
            answer = {"error": None}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
