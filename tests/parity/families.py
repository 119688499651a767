"""Small families of models: a base and three experts of one architecture, random throughout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

EXPERTS = 3

_DECODER = {
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_BERT = {
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "vocab_size": 211,
    "max_position_embeddings": 64,
    "num_labels": 3,
}
_GPT2 = {"n_embd": 48, "n_layer": 5, "n_head": 4, "vocab_size": 211, "n_positions": 64}

# The classes of the model and of its configuration, and what that is told.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _DECODER | {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", _DECODER),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "bert": ("BertForSequenceClassification", "BertConfig", _BERT),
}


def make_family(architecture: str, folder: Path) -> list[Path]:
    """Write a family in float32; the base comes first.

    Fresh norms are all ones and fresh biases all zeros, so everything is perturbed before the base
    is saved. The experts' deltas have heavy tails, as those of real fine-tuning have, and no two
    of a tensor have the same magnitude: there the two tools trim differently on purpose.
    """
    import torch
    import transformers

    torch.manual_seed(sorted(ARCHITECTURES).index(architecture))
    model_class, config_class, settings = ARCHITECTURES[architecture]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    base = {name: value.clone() for name, value in model.state_dict().items()}
    paths = [folder / "base", *(folder / f"expert-{k}" for k in range(1, EXPERTS + 1))]
    for path in paths:
        model.load_state_dict(base)
        if path != paths[0]:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(_fine_tuned(parameter))
        model.save_pretrained(path)
    return paths


def _fine_tuned(base: torch.Tensor) -> torch.Tensor:
    import torch

    tuned = base.clone()
    repeated = torch.ones_like(base, dtype=torch.bool)
    while repeated.any():
        noise = 0.01 * torch.randn_like(base) ** 3
        tuned = torch.where(repeated, base + noise, tuned)
        _, which, counts = torch.unique(
            (tuned - base).abs(), return_inverse=True, return_counts=True
        )
        repeated = counts[which] > 1
    return tuned
