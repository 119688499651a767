"""Writes families of random Llama-shaped checkpoints in bfloat16, one stretch at a time.

    python benchmarks/models.py FOLDER 220M --models 4

makes FOLDER/0 (the base), FOLDER/1, ... (the base plus small random changes).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

STRETCH = 1 << 21
"""Numbers drawn at once."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model with heads of width 64."""

    layers: int
    width: int
    inner: int
    key_value_heads: int
    vocabulary: int = 32_000

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes in the order of the file."""
        wide, narrow = self.width, 64 * self.key_value_heads
        yield "model.embed_tokens.weight", (self.vocabulary, wide)
        for layer in range(self.layers):
            of = f"model.layers.{layer}."
            yield of + "input_layernorm.weight", (wide,)
            yield of + "self_attn.q_proj.weight", (wide, wide)
            yield of + "self_attn.k_proj.weight", (narrow, wide)
            yield of + "self_attn.v_proj.weight", (narrow, wide)
            yield of + "self_attn.o_proj.weight", (wide, wide)
            yield of + "post_attention_layernorm.weight", (wide,)
            yield of + "mlp.gate_proj.weight", (self.inner, wide)
            yield of + "mlp.up_proj.weight", (self.inner, wide)
            yield of + "mlp.down_proj.weight", (wide, self.inner)
        yield "model.norm.weight", (wide,)
        yield "lm_head.weight", (self.vocabulary, wide)

    @property
    def parameters(self) -> int:
        """How many numbers a model holds."""
        return sum(math.prod(shape) for _, shape in self.tensors())

    def config(self) -> dict[str, object]:
        """What goes into config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.width // 64,
            "num_key_value_heads": self.key_value_heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }


SHAPES = {
    "tiny": Shape(layers=2, width=128, inner=256, key_value_heads=2, vocabulary=1000),
    "30M": Shape(layers=6, width=512, inner=1408, key_value_heads=8, vocabulary=12_000),
    "60M": Shape(layers=8, width=640, inner=1760, key_value_heads=10, vocabulary=16_000),
    "220M": Shape(layers=12, width=1024, inner=2816, key_value_heads=16),
    "220M, 48 layers": Shape(layers=48, width=1024, inner=2816, key_value_heads=16),
    "1.1B": Shape(layers=22, width=2048, inner=5632, key_value_heads=4),
}


def write_family(folder: Path, shape: Shape, models: int) -> None:
    """Write all models of a family at once, so that the base is drawn only once."""
    header = _header(shape)
    random = np.random.default_rng(0)
    with ExitStack() as stack:
        files = []
        for model in range(models):
            place = folder / str(model)
            place.mkdir(parents=True)
            (place / "config.json").write_text(json.dumps(shape.config()), encoding="utf-8")
            files.append(stack.enter_context((place / "model.safetensors").open("wb")))
            files[-1].write(header)
        for name, sizes in shape.tensors():
            center = 1 if "norm" in name else 0
            count = math.prod(sizes)
            for start in range(0, count, STRETCH):
                step = min(STRETCH, count - start)
                base = center + 0.02 * random.standard_normal(step, np.float32)
                files[0].write(_bfloat16(base))
                for file in files[1:]:
                    change = 0.002 * random.standard_normal(step, np.float32)
                    file.write(_bfloat16(base + change))


def _header(shape: Shape) -> bytes:
    entries, place = {}, 0
    for name, sizes in shape.tensors():
        end = place + 2 * math.prod(sizes)
        entries[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [place, end]}
        place = end
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bfloat16(values: np.ndarray) -> bytes:
    """Round to nearest, ties to even; the values are finite."""
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--models", type=int, default=4)
    arguments = parser.parse_args()
    write_family(arguments.folder, SHAPES[arguments.shape], arguments.models)


if __name__ == "__main__":
    main()
