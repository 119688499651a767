"""Tiny networks of all known families, from their real configurations, with random weights."""

from __future__ import annotations

import torch

from isthmus.symmetry.architectures import architecture_of

WIDTH, VOCABULARY, PLACES = 16, 40, 24


def _shape(**changes):
    return {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": WIDTH,
        "intermediate_size": 24,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": PLACES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    } | changes


_GPT2 = {
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": PLACES,
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT_BIN = {"dim": WIDTH, "n_heads": 4, "n_layers": 2, "hidden_dim": 24}
_DISTIL = _BERT_BIN | {"vocab_size": VOCABULARY, "max_position_embeddings": PLACES}
_VIT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "image_size": 8,
    "patch_size": 4,
    "num_channels": 1,
}

CAUSAL, MASKED = "CausalLM", "MaskedLM"
SEQUENCE, IMAGES = "SequenceClassification", "ImageClassification"

NETWORKS = {
    "llama": ("llama", CAUSAL, _shape(num_key_value_heads=2)),
    "llama_one_group": ("llama", CAUSAL, _shape(num_key_value_heads=1)),
    "llama_no_groups": ("llama", CAUSAL, _shape(num_key_value_heads=4)),
    "llama_biases_tied_wide_heads": (
        "llama",
        CAUSAL,
        _shape(
            num_key_value_heads=2,
            head_dim=6,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "llama_classifier": ("llama", SEQUENCE, _shape(num_key_value_heads=2)),
    "mistral": ("mistral", CAUSAL, _shape(num_key_value_heads=2, sliding_window=4)),
    "qwen2": ("qwen2", CAUSAL, _shape(num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen3": ("qwen3", CAUSAL, _shape(num_key_value_heads=2, head_dim=6)),
    "gemma": ("gemma", CAUSAL, _shape(num_key_value_heads=1, head_dim=6)),
    "gemma2": ("gemma2", CAUSAL, _shape(num_key_value_heads=2, head_dim=6)),
    "gemma3_text": ("gemma3_text", CAUSAL, _shape(num_key_value_heads=2, head_dim=6)),
    "phi3": ("phi3", CAUSAL, _shape(num_key_value_heads=2)),
    "phi": ("phi", CAUSAL, _shape()),
    "phi_normed": ("phi", CAUSAL, _shape(qk_layernorm=True, hidden_act="relu")),
    "gpt2": ("gpt2", CAUSAL, _GPT2),
    "gpt2_untied": ("gpt2", CAUSAL, _GPT2 | {"tie_word_embeddings": False, "n_inner": 40}),
    "gpt_neox": ("gpt_neox", CAUSAL, _shape(hidden_size=32)),
    "gpt_neox_in_turn": (
        "gpt_neox",
        CAUSAL,
        _shape(use_parallel_residual=False, rotary_pct=1.0, tie_word_embeddings=True),
    ),
    "bert": ("bert", MASKED, _shape()),
    "bert_untied": ("bert", MASKED, _shape(tie_word_embeddings=False, hidden_act="relu")),
    "bert_classifier": ("bert", SEQUENCE, _shape()),
    "bert_tokens": ("bert", "TokenClassification", _shape()),
    "bert_pretraining": ("bert", "PreTraining", _shape()),
    "roberta": ("roberta", MASKED, _shape()),
    "roberta_classifier": ("roberta", SEQUENCE, _shape()),
    "distilbert": ("distilbert", MASKED, _DISTIL),
    "distilbert_classifier": ("distilbert", SEQUENCE, _DISTIL),
    "distilbert_answers": ("distilbert", "QuestionAnswering", _DISTIL),
    "vit": ("vit", IMAGES, _VIT),
}


def described(name: str, **changes):
    """The configuration, as transformers has it, and the auto class."""
    import transformers

    kind, task, shape = NETWORKS[name]
    config = transformers.AutoConfig.for_model(kind, **shape | changes)
    config._attn_implementation = "eager"
    return config, getattr(transformers, f"AutoModelFor{task}")


def built(name: str, seed: int = 0, **changes):
    """A network in float64 with random weights everywhere, its configuration and its parameters."""
    config, auto = described(name, **changes)
    torch.manual_seed(seed)
    network = auto.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    said = network.config.to_dict() | {"architectures": [type(network).__name__]}
    return network, said, {key: x.detach() for key, x in network.named_parameters()}


def architecture(said, parameters, **options):
    return architecture_of(said, {key: tuple(x.shape) for key, x in parameters.items()}, **options)
