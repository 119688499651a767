"""Tiny checkpoints that look like real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import isthmus
from isthmus.errors import IsthmusError

WIDTH, LAYERS, VOCABULARY = 16, 3, 40

StateDict = dict[str, torch.Tensor]


def llama_state(seed: int, *, noise_of: int | None = None, layers: int = LAYERS) -> StateDict:
    """Random weights; with `noise_of`, those of another seed plus a little of this one's."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (WIDTH, WIDTH),
            prefix + "mlp.down_proj.weight": (WIDTH, 3 * WIDTH),
            prefix + "input_layernorm.weight": (WIDTH,),
        }
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCABULARY, WIDTH)}
    state = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    if noise_of is None:
        return state
    origin = llama_state(noise_of, layers=layers)
    return {name: origin[name] + 0.1 * tensor for name, tensor in state.items()}


def write_model(folder: Path, state: StateDict, **config: object) -> Path:
    """A Hugging Face folder with one safetensors file."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    content = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]} | config
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def family(root: Path, count: int = 3, dtype: torch.dtype = torch.float32) -> list[Path]:
    """A base and experts near it: root/base, root/expert1, ..."""
    states = [llama_state(0)] + [llama_state(seed, noise_of=0) for seed in range(1, count + 1)]
    names = ["base", *(f"expert{number}" for number in range(1, count + 1))]
    return [
        write_model(root / name, {k: v.to(dtype) for k, v in state.items()})
        for name, state in zip(names, states, strict=True)
    ]


def recipe(method: str, models: list[Path], base: Path | None = None, **extra: object) -> dict:
    """A recipe with weight 1 where the method has weights."""
    entry = {} if method in ("slerp", "passthrough") else {"parameters": {"weight": 1.0}}
    content: dict = {
        "merge_method": method,
        "models": [{"model": str(path), **entry} for path in models],
    }
    if base is not None:
        content["base_model"] = str(base)
    return content | extra


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def refused(content, out, kind=IsthmusError, **options) -> str:
    """The message of a refused merge; the output folder must not look like a model."""
    with pytest.raises(kind) as caught:
        isthmus.merge(content, out, **options)
    assert not (out / "config.json").exists()
    return str(caught.value)
