"""GPT-2 of a few million parameters on one genre of text, trained with AdamW or with Muon."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from isthmus.lab.data.corpora import GENRES, load_genre
from isthmus.lab.networks.state import seeded
from isthmus.lab.paths.training import fit, kept
from isthmus.optim.lion_k import Muon
from isthmus.optim.parameter_groups import parameter_groups

if TYPE_CHECKING:
    from tokenizers import Tokenizer

OptimizerName = Literal["adamw", "muon"]


@dataclass(frozen=True)
class LanguageTraining:
    """Sizes and training of the language models.

    Attributes:
        width: Of the residual stream.
        layers: Blocks.
        heads: Of each block.
        vocabulary: Of a BPE tokenizer that is trained on the training text.
        context: Tokens of an example.
        batch: Examples of a step.
        steps: Of training.
        warmup: The first of them.
        adamw: AdamW's highest learning rate.
        muon: Muon's for matrices; all else is trained by AdamW then too.
        decay: Weight decay of both; no decay of biases and gains.
        characters: Of the training text.
        held_out: Characters of the held-out text of each genre.
    """

    width: int = 192
    layers: int = 6
    heads: int = 6
    vocabulary: int = 2048
    context: int = 64
    batch: int = 16
    steps: int = 600
    warmup: int = 50
    adamw: float = 2e-3
    muon: float = 0.02
    decay: float = 0.1
    characters: int = 6_000_000
    held_out: int = 200_000


def tokenizer(text: str, vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer trained on a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text], trainer)
    return made


def examples(made: Tokenizer, text: str, context: int) -> Tensor:
    """A text's tokens in rows of one length, shape [N, context]."""
    tokens = torch.tensor(made.encode(text).ids)
    rows: Tensor = tokens[: len(tokens) // context * context].reshape(-1, context)
    return rows


def configuration(settings: LanguageTraining, *, tied: bool = True) -> dict[str, Any]:
    """What the models' `config.json` would say."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": settings.vocabulary,
        "n_positions": settings.context,
        "n_embd": settings.width,
        "n_layer": settings.layers,
        "n_head": settings.heads,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "use_cache": False,
        "tie_word_embeddings": tied,
    }


def network(settings: LanguageTraining, *, tied: bool = True) -> nn.Module:
    """An untrained GPT-2 without dropout, its head tied to the embedding or not."""
    from transformers import GPT2Config, GPT2LMHeadModel

    made: nn.Module = GPT2LMHeadModel(GPT2Config.from_dict(configuration(settings, tied=tied)))
    return made


def trained(
    rows: Tensor, settings: LanguageTraining, optimizer: OptimizerName, seed: int, **told: Any
) -> nn.Module:
    """A model trained on examples; the seed decides its start and the order of the data."""
    seeded(seed)
    made = network(settings)
    return fit(
        made,
        batches(rows, settings.batch, seed),
        lambda module, batch: next_token_loss(module, batch["input_ids"]),
        optimizers(made, settings, optimizer),
        settings.steps,
        warmup=settings.warmup,
        clip=1.0,
        **told,
    )


def optimizers(
    made: nn.Module, settings: LanguageTraining, name: OptimizerName
) -> list[torch.optim.Optimizer]:
    """AdamW for all, or Muon for the matrices and AdamW for the rest.

    Muon's update has the size √(rows / columns) at least 1, as in Jordan et al. 2024, and fused queries, keys and
    values are three matrices to it.
    """
    groups = parameter_groups(made)
    matrices = [group for group in groups if group["kind"] == "matrices"]
    rest = groups if name == "adamw" else [g for g in groups if g["kind"] != "matrices"]
    plain = [
        {
            "params": group["params"],
            "weight_decay": 0.0 if group["kind"] == "vectors" else settings.decay,
        }
        for group in rest
    ]
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(plain, lr=settings.adamw, betas=(0.9, 0.95))
    ]
    if name == "muon":
        found.append(
            Muon(
                matrices,
                lr=settings.muon,
                weight_decay=settings.decay,
                newton_schulz_dtype=torch.float32,
            )
        )
    return found


def batches(rows: Tensor, size: int, seed: int) -> Iterator[Mapping[str, Tensor]]:
    """Batches of examples, epoch after epoch, each in another order."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(rows), generator=generator)
        for start in range(0, len(rows) - size + 1, size):
            yield {"input_ids": rows[order[start : start + size]]}


def next_token_loss(module: nn.Module, rows: Tensor) -> Tensor:
    """Mean cross entropy of the next token."""
    logits = module(input_ids=rows).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@dataclass(frozen=True)
class Texts:
    """What the language models are trained and judged on.

    Attributes:
        genre: The one they are trained on.
        training: Examples, shape [N, context].
        held_out: By genre.
    """

    genre: str
    training: Tensor
    held_out: Mapping[str, Tensor]


def texts(folder: Path, settings: LanguageTraining, genre: str = GENRES[0]) -> Texts:
    """Draw the texts, train the tokenizer, encode.

    Args:
        folder: Where `make data` put its data.
        settings: Sizes.
        genre: The one to train on; the others are held out as a whole.

    Raises:
        IsthmusError: The data is not there.
    """
    own = load_genre(folder, genre, settings.characters, settings.held_out)
    made = tokenizer(own.training, settings.vocabulary)
    held_out = {genre: examples(made, own.held_out, settings.context)}
    for other in GENRES:
        if other != genre:
            text = load_genre(folder, other, 0, settings.held_out).held_out
            held_out[other] = examples(made, text, settings.context)
    return Texts(genre, examples(made, own.training, settings.context), held_out)


def model(
    read: Texts,
    settings: LanguageTraining,
    optimizer: OptimizerName,
    seed: int,
    place: Path,
    **told: Any,
) -> dict[str, Tensor]:
    """A model's tensors, trained now or before; the tied head stands once.

    Args:
        read: The texts.
        settings: Of the training.
        optimizer: Which.
        seed: Of start and order.
        place: Where models are kept.
        told: `advance` of `fit`.
    """
    record = {
        "tokens": hashlib.sha256(read.training.numpy().tobytes()).hexdigest(),
        "training": asdict(settings),
        "optimizer": optimizer,
        "seed": seed,
    }
    tensors = kept(
        place / f"{optimizer}-{seed}",
        record,
        lambda: trained(read.training, settings, optimizer, seed, **told),
    )
    return {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
