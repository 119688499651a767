"""Networks that read a text or an image as a whole."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.symmetry.architectures.architecture import RESIDUAL
from isthmus.symmetry.architectures.builder import (
    Builder,
    factors_through,
    heads_without_rope,
    reader,
    separate,
)
from isthmus.symmetry.monomial import Monomial
from isthmus.symmetry.spec import FREE, Dimension, on

_POST_NORM = "the gains of its norms act on the stream itself"


def bert(build: Builder) -> None:
    """BERT and RoBERTa: the norms stand on the stream, so that its units can only change places."""
    width = build.number("hidden_size")
    heads = build.number("num_attention_heads")
    group = heads_without_rope(heads, width // heads)
    build.stream(width, "layer", fixed=_POST_NORM)
    embeddings = f"{build.body}embeddings"
    for name in ("word", "position", "token_type"):
        build.on_last(f"{embeddings}.{name}_embeddings.weight", build.writes)
    build.gains(f"{embeddings}.LayerNorm")
    build.site(RESIDUAL, f"{embeddings}.LayerNorm")
    for number, at in enumerate(build.layers("encoder.layer")):
        axis = f"layers.{number}.attention"
        names = (f"{at}.attention.self.{part}" for part in ("query", "key", "value"))
        build.attention(axis, group, separate(axis, *names), f"{at}.attention.output.dense")
        build.gains(f"{at}.attention.output.LayerNorm")
        build.mlp(
            f"layers.{number}.mlp",
            f"{at}.intermediate.dense",
            f"{at}.output.dense",
            build.number("intermediate_size"),
            build.activation("gelu"),
        )
        build.gains(f"{at}.output.LayerNorm")
        build.site(RESIDUAL, f"{at}.output.LayerNorm")
    pooled = FREE
    if f"{build.body}pooler.dense.weight" in build.shapes:
        pooled = _pooler(build, f"{build.body}pooler.dense")
    _masked(build, ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"))
    _masked(build, ("lm_head.dense", "lm_head.layer_norm"))
    build.free("cls.predictions.bias", "cls.predictions.decoder.bias")
    build.free("lm_head.bias", "lm_head.decoder.bias")
    for head in ("cls.predictions.decoder", "lm_head.decoder"):
        if f"{head}.weight" in build.shapes:
            build.on_last(f"{head}.weight", build.decoded)
    if "cls.seq_relationship.weight" in build.shapes:
        build.linear("cls.seq_relationship", pooled, FREE)
    if "classifier.dense.weight" in build.shapes:
        _dense_then(build, "classifier.dense", "classifier.out_proj", "tanh")
    _classifiers(build, pooled)


def distilbert(build: Builder) -> None:
    """DistilBERT: BERT with other names, without token types and pooler."""
    width = build.number("dim", "hidden_size")
    heads = build.number("n_heads", "num_attention_heads")
    group = heads_without_rope(heads, width // heads)
    build.stream(width, "layer", fixed=_POST_NORM)
    embeddings = f"{build.body}embeddings"
    for name in ("word", "position"):
        build.on_last(f"{embeddings}.{name}_embeddings.weight", build.writes)
    build.gains(f"{embeddings}.LayerNorm")
    build.site(RESIDUAL, f"{embeddings}.LayerNorm")
    for number, at in enumerate(build.layers("transformer.layer")):
        axis = f"layers.{number}.attention"
        names = (f"{at}.attention.{part}_lin" for part in ("q", "k", "v"))
        build.attention(axis, group, separate(axis, *names), f"{at}.attention.out_lin")
        build.gains(f"{at}.sa_layer_norm")
        build.mlp(
            f"layers.{number}.mlp",
            f"{at}.ffn.lin1",
            f"{at}.ffn.lin2",
            build.number("hidden_dim", "intermediate_size"),
            build.activation("gelu"),
        )
        build.gains(f"{at}.output_layer_norm")
        build.site(RESIDUAL, f"{at}.output_layer_norm")
    _masked(build, ("vocab_transform", "vocab_layer_norm"))
    build.free("vocab_projector.bias")
    if "vocab_projector.weight" in build.shapes:
        build.on_last("vocab_projector.weight", build.decoded)
    if "pre_classifier.weight" in build.shapes:
        _dense_then(build, "pre_classifier", "classifier", "relu")
    _classifiers(build, FREE)


def vit(build: Builder) -> None:
    """ViT: patches, learned positions, LayerNorm; by its old and its new names."""
    width = build.number("hidden_size")
    heads = build.number("num_attention_heads")
    group = heads_without_rope(heads, width // heads)
    build.stream(width, "layer")
    embeddings = f"{build.body}embeddings"
    for name in ("cls_token", "mask_token", "position_embeddings"):
        build.on_last(f"{embeddings}.{name}", build.writes, needed=name != "mask_token")
    projection = f"{embeddings}.patch_embeddings.projection"
    build.tensors[f"{projection}.weight"] = (build.writes, FREE, FREE, FREE)
    build.tensors[f"{projection}.bias"] = (build.writes,)
    old = build.layers("encoder.layer")
    for number, at in enumerate(old or build.layers("layers")):
        axis = f"layers.{number}.attention"
        if old:
            names = [f"{at}.attention.attention.{part}" for part in ("query", "key", "value")]
            output = f"{at}.attention.output.dense"
            up, down = f"{at}.intermediate.dense", f"{at}.output.dense"
        else:
            names = [f"{at}.attention.{part}_proj" for part in ("q", "k", "v")]
            output = f"{at}.attention.o_proj"
            up, down = f"{at}.mlp.fc1", f"{at}.mlp.fc2"
        readers = build.attention(axis, group, separate(axis, *names), output)
        build.stream_norm(f"{at}.layernorm_before", readers)
        units = build.number("intermediate_size")
        readers = build.mlp(f"layers.{number}.mlp", up, down, units, build.activation("gelu"))
        build.stream_norm(f"{at}.layernorm_after", readers)
        build.site(RESIDUAL, at)
    readers = []
    if f"{build.body}pooler.dense.weight" in build.shapes:
        pooler = f"{build.body}pooler.dense"
        build.linear(pooler, build.reads, FREE)
        readers.append(reader(pooler))
    if "classifier.weight" in build.shapes:
        build.linear("classifier", build.reads, FREE)
        readers.append(reader("classifier"))
        build.has_outputs = True
    build.stream_norm(f"{build.body}layernorm", readers)


def _pooler(build: Builder, module: str) -> Dimension:
    """Where the pooler's units lie: their signs may change only if a head of the network reads them."""
    names = build.config.get("architectures") or [""]
    by_token = any(task in names[0] for task in ("TokenClassification", "QuestionAnswering"))
    read = "cls.seq_relationship.weight" in build.shapes or (
        "classifier.weight" in build.shapes and not by_token
    )
    if not read:
        build.linear(module, build.reads, FREE)
        return FREE
    _dense(build, "pooler", module, "tanh")
    return on("pooler", "dual")


def _dense(build: Builder, axis: str, module: str, activation: str) -> None:
    units = build.shapes[f"{module}.weight"][0]
    build.axes[axis] = Monomial(units, factors_through(activation))
    build.linear(module, build.reads, on(axis))
    build.site(axis, module)


def _dense_then(build: Builder, module: str, output: str, activation: str) -> None:
    """A layer that reads the stream, and the last one."""
    _dense(build, "classifier", module, activation)
    build.linear(output, on("classifier", "dual"), FREE)
    build.has_outputs = True


def _masked(build: Builder, modules: Sequence[str]) -> None:
    """The layer and the norm before the output embedding, which may be the input embedding."""
    dense, norm = modules
    if f"{dense}.weight" not in build.shapes:
        return
    out, into, gains = build.writes, build.reads, on(RESIDUAL, "gain") if build.writes else FREE
    if not build.config.get("tie_word_embeddings", True):
        build.axes["transform"] = Monomial(build.shapes[f"{dense}.weight"][0])
        out, into, gains = on("transform"), on("transform", "dual"), on("transform", "gain")
        build.site("transform", dense)
    build.linear(dense, build.reads, out)
    build.tensors[f"{norm}.weight"] = (gains,)
    build.tensors[f"{norm}.bias"] = (out,)
    build.decoded = into
    build.has_outputs = True


def _classifiers(build: Builder, pooled: Dimension) -> None:
    """Heads of one layer: on the pooler's output if something takes it, or on every token."""
    for head in ("classifier", "qa_outputs"):
        name = f"{head}.weight"
        if name in build.shapes and name not in build.tensors:
            build.linear(head, pooled or build.reads, FREE)
            build.has_outputs = True
