"""Fine-tunes of a pretrained encoder of text at a noise scale, merged by three methods."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from isthmus.errors import IsthmusError
from isthmus.lab.cache import content_key, file_hash
from isthmus.lab.data.named import Data
from isthmus.lab.encoders import Encoder
from isthmus.lab.evaluate import evaluate
from isthmus.lab.experts import LOADERS, draw_tasks
from isthmus.lab.heads import Head, fit_head
from isthmus.lab.noise.text_settings import TextTransferSettings
from isthmus.lab.noise.training import train
from isthmus.lab.noise.transfer_merges import State, merge_figures
from isthmus.lab.packaged import minilm
from isthmus.lab.paths.training import kept
from isthmus.lab.settings import Sizes
from isthmus.lab.text import Task

_INVERSE_PENALTY = 1.0
"""Of the linear probes that serve as heads, as in the demo."""


def run_text_transfer(
    settings: TextTransferSettings, folder: Path, tell: Callable[[float], None], *, cache: Path
) -> Mapping[str, Any]:
    """Fine-tune MiniLM on each task, under the task's fixed head, and merge the experts.

    Args:
        settings: Of the fine-tunes.
        folder: For checkpoints: every half minute, and of each expert that is done.
        tell: Told the share that is done.
        cache: Heads are kept there.

    Returns:
        ``noise_scale``; ``accuracy``, of the experts on their own tasks, and ``base_accuracy``, of the pretrained
        encoder under the same heads; and what `merge_figures` returns, from accuracies over all tasks.

    Raises:
        Diverged: A fine-tune did, or ended no better than guessing.
        IsthmusError: A package with weights or texts is missing, a corpus is too small, or the encoder has
            fewer blocks than are to be trained.
    """
    place = minilm()
    encoder = Encoder.load(place)
    tasks = _tasks(settings)
    heads = {
        name: _head(encoder, place, task, cache / "lab-noise" / f"head-{name}-seed-{settings.seed}")
        for name, task in tasks.items()
    }
    _train_only_the_last(encoder.model, settings.layers)
    parameters = {
        name: value for name, value in encoder.model.named_parameters() if value.requires_grad
    }
    base = _copied(parameters)
    experts, accuracies = [], []
    for number, name in enumerate(settings.tasks):
        _put(parameters, base)
        train(
            _Classifier(encoder, heads[name]),
            _data(encoder, tasks[name]),
            settings.training,
            epochs=(0, settings.epochs),
            order=(settings.seed, number),
            checkpoint=folder / f"expert-{number}.pt",
            tell=partial(_told, tell, number, len(settings.tasks)),
        )
        experts.append(_copied(parameters))
        accuracies.append(evaluate(encoder, heads, {name: tasks[name]}, "test")[name])

    def judged(part: Literal["validation", "test"], tensors: State) -> float:
        _put(parameters, tensors)
        found = evaluate(encoder, heads, tasks, part)
        return fmean(found[name] for name in settings.tasks)

    accuracy = fmean(accuracies)
    return {
        "noise_scale": settings.noise_scale,
        "accuracy": accuracy,
        "base_accuracy": judged("test", base),
        **merge_figures(
            base,
            experts,
            accuracy,
            validate=partial(judged, "validation"),
            test=partial(judged, "test"),
        ),
    }


class _Classifier(nn.Module):
    """Token numbers [B, T], filled up with the number of padding, to logits [B, C]; the head is no parameter."""

    def __init__(self, encoder: Encoder, head: Head) -> None:
        super().__init__()
        self.model = encoder.model
        self._encoder = encoder
        self._head = head

    def forward(self, tokens: Tensor) -> Tensor:
        padding = self._encoder.tokenizer.pad_token_id
        return self._head.logits(
            self._encoder.embed([row[row != padding].tolist() for row in tokens])
        )

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Dropout stays off, so that the order of examples decides everything."""
        return super().train(False)


def _told(tell: Callable[[float], None], number: int, count: int, share: float) -> None:
    tell((number + share) / count)


def _tasks(settings: TextTransferSettings) -> dict[str, Task]:
    names = dict.fromkeys(settings.tasks)
    size = Sizes(settings.examples, settings.validation, settings.test, settings.tokens)
    return draw_tasks(
        {name: LOADERS[name]() for name in names}, dict.fromkeys(names, size), settings.seed
    )


def _head(encoder: Encoder, place: Path, task: Task, folder: Path) -> Head:
    """The linear probe of the task's training examples on features of the pretrained encoder."""
    record = {
        "base": file_hash(place / "model.safetensors"),
        "training_data": content_key(asdict(task.train)),
        "tokens": task.max_length,
        "inverse_penalty": _INVERSE_PENALTY,
    }

    def fitted() -> nn.Module:
        features = encoder.features(task.train.texts, task.max_length)
        head = fit_head(features, task.train.labels, _INVERSE_PENALTY)
        classes, width = head.weight.shape
        linear = nn.Linear(width, classes)
        linear.load_state_dict({"weight": head.weight, "bias": head.bias})
        return linear

    tensors = kept(folder, record, fitted)
    return Head(tensors["weight"], tensors["bias"])


def _train_only_the_last(model: nn.Module, layers: int | None) -> None:
    """Let the last blocks have gradients, and nothing else."""
    blocks: Any = model.encoder.layer  # type: ignore[union-attr]
    if layers is not None and layers > len(blocks):
        raise IsthmusError(
            f"The encoder has {len(blocks)} blocks, not {layers}",
            "Lower `layers`, or leave it out.",
        )
    model.requires_grad_(False)
    for block in blocks[-(layers or len(blocks)) :]:
        block.requires_grad_(True)


def _data(encoder: Encoder, task: Task) -> Data:
    """What is trained on, as tensors; what is judged by stays text."""
    tokens = encoder.tokenize(task.train.texts, task.max_length)
    padding = encoder.tokenizer.pad_token_id
    longest = max(map(len, tokens))
    rows = [[*row, *[padding] * (longest - len(row))] for row in tokens]
    inputs, targets = torch.tensor(rows), torch.tensor(task.train.labels)
    return Data(inputs, targets, inputs[:0], targets[:0], len(task.classes))


def _copied(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in parameters.items()}


def _put(parameters: Mapping[str, nn.Parameter], tensors: State) -> None:
    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(tensors[name])
