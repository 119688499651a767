"""A small vision transformer that takes the place of the sentence encoder, and its pretraining."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from isthmus.lab.data.pictures import SIDE, Pictures
from isthmus.lab.encoders import Encoder, descend
from isthmus.lab.heads import Head
from isthmus.lab.settings import FineTuning
from isthmus.lab.text import Part

PRETRAINING = FineTuning(epochs=3, batch_size=64, learning_rate=1e-3, weight_decay=0.01)
"""How the base is trained."""

PICTURES = 10_000
"""How many pictures of each source the base learns from."""

PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": False,
    "do_rescale": True,
    "rescale_factor": 1 / 127.5,
    "do_normalize": True,
    "image_mean": [1.0],
    "image_std": [1.0],
}
"""What `ImageEncoder.embed` does to the bytes of a picture, for Transformers."""


@dataclass(frozen=True)
class ImageEncoder(Encoder):
    """Names of pictures go in, unit vectors come out; its tokens are pixels.

    The tokenizer is a `Pictures`.
    """

    def tokenize(self, texts: Sequence[str], max_length: int) -> list[list[int]]:  # noqa: ARG002
        """The pixels of every picture; none is cut."""
        pictures: Pictures = self.tokenizer
        return [pictures.pixels(name) for name in texts]

    def reopened(self, folder: Path) -> ImageEncoder:
        """The encoder in another folder, with the same pictures."""
        return load_image_encoder(folder, self.tokenizer)

    def save(self, folder: Path) -> None:
        """Write weights, configuration and the way from bytes to pixel values as a Hugging Face folder."""
        self.model.save_pretrained(folder)
        text = json.dumps(PROCESSOR, indent=2) + "\n"
        (folder / "preprocessor_config.json").write_text(text, encoding="utf-8")

    def embed(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Unit vectors ``[B, D]``: the mean over the patches, normalised."""
        pixels = torch.tensor(tokens, dtype=torch.float32).view(-1, 1, SIDE, SIDE) / 127.5 - 1
        states: Tensor = self.model(pixel_values=pixels).last_hidden_state
        return nn.functional.normalize(states.mean(1), dim=1)


def load_image_encoder(folder: Path, pictures: Pictures) -> ImageEncoder:
    """Load a vision transformer from disk."""
    model = transformers.ViTModel.from_pretrained(
        folder, add_pooling_layer=False, local_files_only=True, dtype=torch.float32
    )
    return ImageEncoder(model.eval(), pictures)


def pretrain(
    pictures: Pictures, per_source: int, tuning: FineTuning, advance: Callable[[int], None]
) -> ImageEncoder:
    """Train an encoder to tell by how many quarter turns a picture was turned.

    This takes no labels (Gidaris et al. 2018, arXiv 1803.07728), so the encoder knows shapes and no
    task: there is something left for adapters to learn.

    Args:
        pictures: Where pictures are looked up; those of the training files are used.
        per_source: How many of each source.
        tuning: Epochs, rates and seed.
        advance: Told how many pictures a step has done.
    """
    chance = random.Random(tuning.seed)  # noqa: S311 (a reproducible draw, not a secret)
    names: list[str] = []
    turns: list[int] = []
    for source in ("mnist", "fashion"):
        for index in range(per_source):
            turns.append(chance.randrange(4))
            names.append(f"{source} train {index} turned {turns[-1]}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tuning.seed)
        model = transformers.ViTModel(
            transformers.ViTConfig(
                hidden_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=256,
                image_size=SIDE,
                patch_size=7,
                num_channels=1,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            ),
            add_pooling_layer=False,
        ).eval()
        # Features are unit vectors: logits need weights of some length.
        weight = nn.Parameter(torch.randn(4, 128))
    head = Head(weight, nn.Parameter(torch.zeros(4)))
    encoder = ImageEncoder(model, pictures)
    trained = [*model.parameters(), head.weight, head.bias]
    descend(encoder, trained, head, Part(tuple(names), tuple(turns)), 1, tuning, advance)
    return encoder
