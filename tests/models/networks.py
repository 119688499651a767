"""Tiny networks of real architectures, saved as the Hub's folders."""

from __future__ import annotations

from pathlib import Path

import torch

WIDTH, LAYERS, HEADS, VOCABULARY, LONGEST = 16, 3, 2, 40, 24
NAMES = ("llama", "gpt2", "bert", "bert_masked", "vit")


def build(name: str, seed: int = 0, **changes):
    """A network with random weights, large enough for their differences to show."""
    import transformers as t

    torch.manual_seed(seed)
    common = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": WIDTH}
    common |= {"intermediate_size": 24, "vocab_size": VOCABULARY}
    common |= {"max_position_embeddings": LONGEST, "bos_token_id": 1, "eos_token_id": 2}
    if name == "llama":
        config = t.LlamaConfig(num_key_value_heads=1, **common | changes)
        network = t.LlamaForCausalLM(config)
    elif name == "gpt2":
        shape = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LONGEST}
        special = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2}
        network = t.GPT2LMHeadModel(t.GPT2Config(**shape | special | changes))
    elif name == "bert":
        network = t.BertForSequenceClassification(t.BertConfig(**common | changes))
    elif name == "bert_masked":
        network = t.BertForMaskedLM(t.BertConfig(**common | changes))
    else:
        shape = {"image_size": 8, "patch_size": 4, "num_channels": 1}
        del common["vocab_size"], common["max_position_embeddings"]
        network = t.ViTForImageClassification(t.ViTConfig(**common | shape | changes))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return network.eval()


def saved(folder: Path, name: str, seed: int = 0, **changes) -> Path:
    build(name, seed, **changes).save_pretrained(folder)
    return folder


def add_tokenizer(folder: Path, words: tuple[str, ...]) -> Path:
    """A word a token, ids from 3 on; 0 is padding, 1 and 2 are special."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "<unk>": 2}
    vocabulary |= {word: number for number, word in enumerate(words, start=3)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<s>"
    )
    fast.save_pretrained(folder)
    return folder


def sequences(seed: int = 0, lengths=(3, 9, 5, 9, 1, 7)) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=draw) for length in lengths]


def padded(rows: list[torch.Tensor], size: int = 2) -> list[dict[str, torch.Tensor]]:
    """Batches of some sequences each, filled up on the right."""
    batches = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in part], True)
        batches.append({"input_ids": ids, "attention_mask": mask})
    return batches


def images(count: int = 5) -> torch.Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))
