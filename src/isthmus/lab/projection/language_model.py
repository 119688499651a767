"""A small causal language model and its tokenizer: pretraining, fine-tuning, perplexity."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from isthmus.lab.projection.language_settings import LanguageSettings, Steps

_END = "<|end|>"
_PADDING = "<|padding|>"


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model and its tokenizer.

    Attributes:
        model: Of Transformers.
        tokenizer: Its tokenizer.
        length: Texts are cut after so many tokens.
    """

    model: Any
    tokenizer: Any
    length: int

    @classmethod
    def load(cls, folder: Path, length: int) -> LanguageModel:
        """Load a folder from disk, in float32."""
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return cls(model.eval(), tokenizer, length)

    def save(self, folder: Path) -> None:
        """Write weights, configuration and tokenizer."""
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def tuned(
        self, texts: Sequence[str], run: Steps, seed: int, advance: Callable[[int], None]
    ) -> LanguageModel:
        """A copy that has learned from texts, drawn anew for every step.

        Args:
            texts: What to learn from.
            run: Steps and rate.
            seed: Fixes the draws.
            advance: Told of every step.
        """
        model = copy.deepcopy(self.model)
        tokens = self._tokens(texts)
        chance = random.Random(seed)  # noqa: S311 (a reproducible draw, not a secret)
        optimizer = torch.optim.AdamW(model.parameters(), lr=run.learning_rate, weight_decay=0.01)
        warm_up = max(1, run.steps // 10)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min((step + 1) / warm_up, 1 - 0.9 * step / run.steps),
        )
        for _ in range(run.steps):
            batch = self._batch(chance.sample(tokens, run.batch))
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            advance(1)
        return LanguageModel(model.eval(), self.tokenizer, self.length)

    def loss(self, texts: Sequence[str]) -> float:
        """Mean negative log-likelihood of a token, the first of each text excepted, in nats."""
        tokens = sorted(self._tokens(texts), key=len)
        total, count = 0.0, 0
        with torch.inference_mode():
            for start in range(0, len(tokens), 16):
                batch = self._batch(tokens[start : start + 16])
                predicted = int((batch["labels"][:, 1:] >= 0).sum())
                total += float(self.model(**batch).loss) * predicted
                count += predicted
        return total / count

    def _tokens(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self.tokenizer(list(texts), truncation=True, max_length=self.length)
        return [row for row in encoded["input_ids"] if len(row) > 1]

    def _batch(self, rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        longest = max(map(len, rows))
        ids = torch.full((len(rows), longest), self.tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        labels = torch.where(mask > 0, ids, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def untrained(texts: Sequence[str], settings: LanguageSettings) -> LanguageModel:
    """A Llama with random weights, and a byte-level tokenizer trained on texts."""
    from tokenizers import ByteLevelBPETokenizer

    trainer = ByteLevelBPETokenizer()
    trainer.train_from_iterator(
        texts,
        vocab_size=settings.vocabulary,
        special_tokens=[_PADDING, _END],
        show_progress=False,
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trainer._tokenizer,
        pad_token=_PADDING,
        eos_token=_END,
        model_max_length=settings.length,
    )
    config = transformers.LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=settings.width,
        intermediate_size=settings.inner,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        max_position_embeddings=settings.length,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
    return LanguageModel(model, tokenizer, settings.length)
