"""A sentence encoder: a transformer with mean pooling, its features and its fine-tuning."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.utils import logging

from isthmus.lab.heads import Head
from isthmus.lab.settings import FineTuning
from isthmus.lab.text import Part

logging.disable_progress_bar()

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Encoder:
    """A transformer and its tokenizer; texts go in, unit vectors of width ``D`` come out."""

    model: Any
    tokenizer: Any

    @classmethod
    def load(cls, folder: Path, tokenizer: Any = None) -> Encoder:
        """Load a Hugging Face folder from disk, in float32 and without dropout.

        Args:
            folder: Holds the weights and the configuration.
            tokenizer: One to share; by default the folder's own is loaded.
        """
        model = transformers.AutoModel.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32
        ).eval()
        if tokenizer is None:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return cls(model, tokenizer)

    def reopened(self, folder: Path) -> Encoder:
        """The encoder in another folder, with this one's tokenizer."""
        return Encoder.load(folder, self.tokenizer)

    def save(self, folder: Path) -> None:
        """Write weights, configuration and tokenizer as a Hugging Face folder."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def tokenize(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        """Token numbers of every text, cut after ``max_length`` tokens."""
        tokens: list[list[int]] = self.tokenizer(
            list(texts), truncation=True, max_length=max_length
        )["input_ids"]
        return tokens

    def embed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Unit vectors ``[B, D]`` of a batch: the mean over each text's own tokens, normalised.

        This is how MiniLM was trained to be pooled. Unit length also keeps a merged encoder from
        gaining or losing by the mere size of its features.
        """
        longest = max(map(len, tokens))
        ids = torch.full((len(tokens), longest), self.tokenizer.pad_token_id)
        mask = torch.zeros((len(tokens), longest), dtype=torch.long)
        for row, numbers in enumerate(tokens):
            ids[row, : len(numbers)] = torch.tensor(numbers)
            mask[row, : len(numbers)] = 1
        states: Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        weight = mask.unsqueeze(-1).to(states.dtype)
        return nn.functional.normalize((states * weight).sum(1) / weight.sum(1), dim=1)

    def features(
        self,
        texts: Sequence[str],
        max_length: int,
        *,
        batch_size: int = 32,
        advance: Advance | None = None,
    ) -> Tensor:
        """Features ``[N, D]`` of ``N`` texts, without gradients.

        Args:
            texts: The texts, one at least.
            max_length: Number of tokens after which a text is cut.
            batch_size: Texts per forward pass; texts of like length go together.
            advance: Told how many texts a forward pass has done.
        """
        tokens = self.tokenize(texts, max_length)
        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
        result = torch.empty(len(texts), self.model.config.hidden_size)
        with torch.inference_mode():
            for start in range(0, len(order), batch_size):
                rows = order[start : start + batch_size]
                result[rows] = self.embed([tokens[i] for i in rows])
                if advance is not None:
                    advance(len(rows))
        return result


def fine_tune(
    encoder: Encoder,
    head: Head,
    part: Part,
    max_length: int,
    settings: FineTuning,
    advance: Advance | None = None,
) -> float:
    """Fine-tune an encoder in place under a head that stays as it is.

    The embedding tables stay as they are too: they are half of MiniLM's parameters, a short run
    touches few of their rows, and AdamW would spend most of its time on the others. Dropout is
    off, so that one seed, the order of the examples, decides everything.

    Args:
        encoder: Changed in place.
        head: Turns features into logits ``[B, C]``; never trained here.
        part: Training examples.
        max_length: Number of tokens after which a text is cut.
        settings: Epochs, rates and seed.
        advance: Told how many examples a step has done.

    Returns:
        Mean loss over the last tenth of the steps.
    """
    model = encoder.model.eval()
    trained = [
        parameter
        for name, parameter in model.named_parameters()
        if not name.startswith(("embeddings.", "pooler."))
    ]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    return descend(encoder, trained, head, part, max_length, settings, advance)


def descend(
    encoder: Encoder,
    trained: Sequence[nn.Parameter],
    head: Head,
    part: Part,
    max_length: int,
    settings: FineTuning,
    advance: Advance | None = None,
) -> float:
    """Train some parameters of an encoder in place, under a head that stays as it is.

    Args:
        encoder: Changed in place; a wrapper of its model, such as PEFT's, will do.
        trained: The parameters that AdamW moves; those that need a gradient.
        head: Turns features into logits ``[B, C]``; never trained here.
        part: Training examples.
        max_length: Number of tokens after which a text is cut.
        settings: Epochs, rates and seed.
        advance: Told how many examples a step has done.

    Returns:
        Mean loss over the last tenth of the steps.
    """
    tokens = encoder.tokenize(part.texts, max_length)
    labels = torch.tensor(part.labels)
    lengths = [len(numbers) for numbers in tokens]
    chance = random.Random(settings.seed)  # noqa: S311 (a reproducible order, not a secret)
    batches = [
        batch
        for _ in range(settings.epochs)
        for batch in _batches(lengths, settings.batch_size, chance)
    ]
    optimizer = torch.optim.AdamW(
        trained, lr=settings.learning_rate, weight_decay=settings.weight_decay
    )
    warm_up = max(1, len(batches) // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, (len(batches) - step) / len(batches)),
    )
    losses: list[float] = []
    for batch in batches:
        logits = head.logits(encoder.embed([tokens[i] for i in batch]))
        loss = nn.functional.cross_entropy(logits, labels[batch])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if advance is not None:
            advance(len(batch))
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def _batches(lengths: Sequence[int], size: int, chance: random.Random) -> Iterator[list[int]]:
    """One epoch of batches in random order; texts of like length share one and need less padding.

    Sorting happens within windows of sixteen batches, so that batches still differ from epoch to
    epoch.
    """
    order = list(range(len(lengths)))
    chance.shuffle(order)
    window = 16 * size
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        near = sorted(order[start : start + window], key=lengths.__getitem__)
        batches += [near[i : i + size] for i in range(0, len(near), size)]
    chance.shuffle(batches)
    yield from batches
