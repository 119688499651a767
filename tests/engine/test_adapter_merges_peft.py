"""Adapters made by PEFT, merged by Isthmus, and loaded by PEFT again."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import save_file

import isthmus

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")


class Convolutional(torch.nn.Module):
    """A convolution, a linear layer with bias and an embedding."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(10, 16)
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.linear = torch.nn.Linear(64, 8)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, ids):
        image = self.tokens(ids).unsqueeze(1)
        features = torch.relu(self.conv(image)).mean(2).flatten(1)
        return self.head(torch.relu(self.linear(features)))


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=30, n_positions=16, tie_word_embeddings=False
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=30,
    )
    return transformers.LlamaForCausalLM(config)


FAMILIES = {
    "gpt2": (gpt2, [{"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}] * 2),
    # PEFT stores the embedding itself beside its update.
    "gpt2's embedding": (gpt2, [{"target_modules": ["wte", "c_attn"], "fan_in_fan_out": True}] * 2),
    "rank patterns": (
        llama,
        [
            {"target_modules": ["q_proj", "down_proj"], "rank_pattern": {"down_proj": 5}},
            {
                "target_modules": ["q_proj", "v_proj"],
                "alpha_pattern": {"layers.0.self_attn.q_proj": 3},
            },
        ],
    ),
    "rslora and plain": (
        llama,
        [{"target_modules": ["q_proj"], "use_rslora": True}, {"target_modules": ["q_proj"]}],
    ),
    "convolution": (Convolutional, [{"target_modules": ["conv", "linear"]}] * 2),
    "embedding": (Convolutional, [{"target_modules": ["tokens", "linear"]}] * 2),
    "bias": (Convolutional, [{"target_modules": ["conv", "linear"], "lora_bias": True}] * 2),
    "head": (Convolutional, [{"target_modules": ["linear"], "modules_to_save": ["head"]}] * 2),
}


def train(base, folder, seed, config):
    """An adapter with random numbers in place of training; returns the model with it merged in."""
    model = peft.get_peft_model(copy.deepcopy(base), peft.LoraConfig(r=3, lora_alpha=6, **config))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
    model.save_pretrained(folder)
    return {k: v.double() for k, v in model.merge_and_unload().state_dict().items()}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("method", ["linear", "cat"])
def test_peft_loads_the_average(name, method, tmp_path):
    make, configs = FAMILIES[name]
    torch.manual_seed(0)
    base = make()
    tuned = [train(base, tmp_path / str(i), i, config) for i, config in enumerate(configs)]
    content = {
        "merge_method": method,
        "models": [{"model": str(tmp_path / "0")}, {"model": str(tmp_path / "1")}],
        "parameters": {"weight": 0.5},
    }
    if method == "linear":
        content["rank"] = 8
    if name == "head":
        save_file(base.state_dict(), tmp_path / "base.safetensors")
        content["base_model"] = str(tmp_path / "base.safetensors")
    isthmus.merge(content, tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "out")
    for key, tensor in loaded.merge_and_unload().state_dict().items():
        expected = (tuned[0][key] + tuned[1][key]) / 2
        assert torch.allclose(tensor.double(), expected, atol=2e-6), key
