"""Language models that read from left to right."""

from __future__ import annotations

from isthmus.symmetry.architectures.architecture import Reader
from isthmus.symmetry.architectures.builder import (
    Builder,
    fused,
    heads_with_rope,
    heads_without_rope,
    interleaved,
    reader,
    separate,
)

_HEADS = ("lm_head", "embed_out", "score", "classifier", "qa_outputs")


def llama(build: Builder) -> None:
    """Llama and its kin: RMSNorm, RoPE, grouped queries, gated MLP."""
    _rms_decoder(build)


def gemma(build: Builder) -> None:
    """The same with gains 1 + γ, and often with norms on what blocks add to the stream."""
    _rms_decoder(build, plus_one=True)


def _rms_decoder(build: Builder, *, plus_one: bool = False) -> None:
    width = build.number("hidden_size")
    heads = build.number("num_attention_heads")
    groups = build.number("num_key_value_heads", default=heads)
    size = build.number("head_dim", default=width // heads)
    units = build.number("intermediate_size")
    blocks = build.layers("layers")
    sandwich = any(f"{at}.pre_feedforward_layernorm.weight" in build.shapes for at in blocks)
    build.stream(
        width,
        "rms",
        fixed="norms with gains stand between the blocks and the stream" if sandwich else "",
    )
    build.on_last(f"{build.body}embed_tokens.weight", build.writes)
    build.site("residual", f"{build.body}embed_tokens")
    for number, at in enumerate(blocks):
        normed = "rms" if f"{at}.self_attn.q_norm.weight" in build.shapes else None
        group = heads_with_rope(heads, groups, size, build.rotary(size, 1.0), normed=normed)
        axis = f"layers.{number}.attention"
        attention = f"{at}.self_attn"
        if f"{attention}.qkv_proj.weight" in build.shapes:
            layers = fused(axis, f"{attention}.qkv_proj", group)
        else:
            names = (f"{attention}.{part}_proj" for part in ("q", "k", "v"))
            layers = separate(axis, *names)
        readers = build.attention(axis, group, layers, f"{attention}.o_proj")
        build.free(f"{attention}.q_norm.weight", f"{attention}.k_norm.weight")
        build.stream_norm(f"{at}.input_layernorm", readers, plus_one=plus_one)
        readers = build.gated_mlp(f"layers.{number}.mlp", f"{at}.mlp", units)
        if sandwich:
            build.gains(f"{at}.post_attention_layernorm")
            build.stream_norm(f"{at}.pre_feedforward_layernorm", readers, plus_one=plus_one)
            build.gains(f"{at}.post_feedforward_layernorm")
        else:
            build.stream_norm(f"{at}.post_attention_layernorm", readers, plus_one=plus_one)
        build.site("residual", at)
    build.stream_norm(
        f"{build.body}norm", _heads(build, f"{build.body}embed_tokens.weight"), plus_one=plus_one
    )


def phi(build: Builder) -> None:
    """Phi: LayerNorm, attention and MLP side by side, partial rotary, biases."""
    width = build.number("hidden_size")
    heads = build.number("num_attention_heads")
    groups = build.number("num_key_value_heads", default=heads)
    size = width // heads
    build.stream(width, "layer")
    build.on_last(f"{build.body}embed_tokens.weight", build.writes)
    build.site("residual", f"{build.body}embed_tokens")
    for number, at in enumerate(build.layers("layers")):
        attention = f"{at}.self_attn"
        normed = "layer" if f"{attention}.q_layernorm.weight" in build.shapes else None
        group = heads_with_rope(heads, groups, size, build.rotary(size, 0.5), normed=normed)
        axis = f"layers.{number}.attention"
        names = (f"{attention}.{part}_proj" for part in ("q", "k", "v"))
        readers = build.attention(axis, group, separate(axis, *names), f"{attention}.dense")
        for part in ("q_layernorm", "k_layernorm"):
            build.free(f"{attention}.{part}.weight", f"{attention}.{part}.bias")
        readers += build.mlp(
            f"layers.{number}.mlp",
            f"{at}.mlp.fc1",
            f"{at}.mlp.fc2",
            build.number("intermediate_size"),
            build.activation("gelu_new"),
        )
        build.stream_norm(f"{at}.input_layernorm", readers)
        build.site("residual", at)
    build.stream_norm(
        f"{build.body}final_layernorm", _heads(build, f"{build.body}embed_tokens.weight")
    )


def gpt2(build: Builder) -> None:
    """GPT-2: learned positions, LayerNorm, one transposed matrix for queries, keys and values."""
    width = build.number("n_embd", "hidden_size")
    heads = build.number("n_head", "num_attention_heads")
    group = heads_without_rope(heads, width // heads)
    build.stream(width, "layer")
    for name in ("wte", "wpe"):
        build.on_last(f"{build.body}{name}.weight", build.writes)
    for number, at in enumerate(build.layers("h")):
        axis = f"layers.{number}.attention"
        layers = fused(axis, f"{at}.attn.c_attn", group)
        readers = build.attention(axis, group, layers, f"{at}.attn.c_proj", transposed=True)
        build.stream_norm(f"{at}.ln_1", readers)
        readers = build.mlp(
            f"layers.{number}.mlp",
            f"{at}.mlp.c_fc",
            f"{at}.mlp.c_proj",
            build.number("n_inner", default=4 * width),
            build.activation("gelu_new"),
            transposed=True,
        )
        build.stream_norm(f"{at}.ln_2", readers)
        build.site("residual", at)
    build.stream_norm(f"{build.body}ln_f", _heads(build, f"{build.body}wte.weight"))


def gpt_neox(build: Builder) -> None:
    """GPT-NeoX and Pythia: LayerNorm, partial rotary, queries, keys and values head by head."""
    width = build.number("hidden_size")
    heads = build.number("num_attention_heads")
    size = width // heads
    group = heads_with_rope(heads, heads, size, build.rotary(size, 0.25))
    build.stream(width, "layer")
    build.on_last(f"{build.body}embed_in.weight", build.writes)
    build.site("residual", f"{build.body}embed_in")
    for number, at in enumerate(build.layers("layers")):
        axis = f"layers.{number}.attention"
        layers = interleaved(axis, f"{at}.attention.query_key_value", heads, size)
        readers = build.attention(axis, group, layers, f"{at}.attention.dense")
        build.stream_norm(f"{at}.input_layernorm", readers)
        readers = build.mlp(
            f"layers.{number}.mlp",
            f"{at}.mlp.dense_h_to_4h",
            f"{at}.mlp.dense_4h_to_h",
            build.number("intermediate_size"),
            build.activation("gelu"),
        )
        build.stream_norm(f"{at}.post_attention_layernorm", readers)
        build.site("residual", at)
    build.stream_norm(
        f"{build.body}final_layer_norm", _heads(build, f"{build.body}embed_in.weight")
    )


def _heads(build: Builder, embedding: str) -> list[Reader]:
    """What reads the last norm: a head of its own, or the input embedding."""
    readers = []
    for head in _HEADS:
        if f"{head}.weight" in build.shapes:
            build.linear(head, build.reads, ())
            readers.append(reader(head))
    names = build.config.get("architectures") or [""]
    # Files of a bare network may still be meant for a class with a tied head; ties, being what
    # Transformers takes for granted, are often left unsaid.
    language = "LM" in names[0] if names[0] else bool(build.body)
    if not readers and language and build.config.get("tie_word_embeddings", True):
        readers.append(reader("lm_head", tied_to=embedding))
    build.has_outputs = bool(readers)
    return readers
