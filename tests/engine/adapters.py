"""Tiny LoRA adapters as PEFT writes them, and what they mean."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from .models import WIDTH

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
SHAPES = {Q: (WIDTH, WIDTH), DOWN: (WIDTH, 3 * WIDTH)}


def write_adapter(
    folder: Path,
    seed: int,
    *,
    modules: tuple[str, ...] = (Q, DOWN),
    r: int = 2,
    ranks: dict[str, int] | None = None,
    dtype: torch.dtype = torch.float32,
    saved: dict[str, torch.Tensor] | None = None,
    scale: float = 1.0,
    **config: object,
) -> Path:
    """An adapter with random factors for some of the modules.

    Args:
        folder: To make.
        seed: Of the numbers.
        modules: Keys of SHAPES.
        r: The rank.
        ranks: Other ranks, by module.
        dtype: Of the factors.
        saved: Tensors to store in full, by the base's names.
        scale: Of B.
        config: More of adapter_config.json.
    """
    draw = torch.Generator().manual_seed(seed)
    tensors = {}
    ranks = ranks or {}
    for module in modules:
        rank = ranks.get(module, r)
        rows, columns = SHAPES[module]
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, columns, generator=draw).to(dtype)
        b = scale * torch.randn(rows, rank, generator=draw)
        tensors[f"{prefix}.lora_B.weight"] = b.to(dtype)
    for name, tensor in (saved or {}).items():
        tensors[f"base_model.model.{name}"] = tensor
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    content = {
        "peft_type": "LORA",
        "base_model_name_or_path": "tiny",
        "r": r,
        "lora_alpha": 4,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "task_type": "CAUSAL_LM",
        "rank_pattern": ranks,
    }
    if saved:
        content["modules_to_save"] = sorted({name.split(".")[-2] for name in saved})
    (folder / "adapter_config.json").write_text(json.dumps(content | config))
    return folder


def updates(folder: Path) -> dict[str, torch.Tensor]:
    """The update of every module in float64, straight from PEFT's definition."""
    config = json.loads((folder / "adapter_config.json").read_text())
    state = load_file(folder / "adapter_model.safetensors")
    found = {}
    for name, a in state.items():
        match = re.fullmatch(r"base_model\.model\.(.+)\.lora_A\.weight", name)
        if match is None:
            continue
        module = match[1]
        rank, alpha = (
            next(
                (
                    v
                    for p, v in (config.get(key) or {}).items()
                    if re.match(rf"(.*\.)?({p})$", module)
                ),
                config[whole],
            )
            for key, whole in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
        )
        assert a.shape[0] == rank
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        b = state[name.replace("lora_A", "lora_B")]
        found[module] = scaling * b.double() @ a.double()
    return found


def close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance=1e-5
) -> None:
    """Every update agrees, relative to its norm."""
    assert found.keys() == expected.keys()
    for module, update in found.items():
        error = (update - expected[module]).norm() / expected[module].norm().clamp(min=1e-12)
        assert error < tolerance, (module, float(error))
