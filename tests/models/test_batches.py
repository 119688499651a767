"""Texts and images as batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isthmus.errors import CalibrationError
from isthmus.models import batches
from isthmus.models.batches import image_batches, joined, text_batches

CONFIG = {"vocab_size": 40, "max_position_embeddings": 24}


class Letters:
    """A token a letter, after one that begins the text."""

    chat_template = "there is one"
    model_max_length = 10**30

    def __call__(self, text, truncation, max_length, add_special_tokens):
        assert truncation
        ids = [1] * add_special_tokens + [3 + ord(letter) - ord("a") for letter in text]
        return {"input_ids": ids[:max_length]}

    def apply_chat_template(self, messages, tokenize):
        assert not tokenize
        return "".join(message["content"] for message in messages)


def rows(made):
    return [
        ids[mask.bool()].tolist()
        for batch in made
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def test_every_token_is_there_once_and_padding_is_masked(monkeypatch):
    monkeypatch.setattr(batches, "BATCH_TOKENS", 8)
    texts = ["abc", "a", "abcde", "ab", "b"]
    made = text_batches(texts, Letters(), CONFIG | {"pad_token_id": 7}, 9)
    encoded = [[1, *(3 + ord(letter) - ord("a") for letter in text)] for text in texts]
    assert sorted(rows(made)) == sorted(encoded)
    for batch in made:
        assert (batch["input_ids"][batch["attention_mask"] == 0] == 7).all()
        assert batch["input_ids"].numel() <= 8
        assert batch["attention_mask"][:, 0].all()


def test_texts_are_cut_and_conversations_bring_their_own_special_tokens():
    chat = [{"role": "user", "content": "ab"}]
    assert rows(text_batches([chat, "abc"], Letters(), CONFIG, 3)) == [[1, 3, 4], [3, 4]]


def test_no_tokens():
    with pytest.raises(CalibrationError, match="no tokens"):
        text_batches([[{"role": "user", "content": ""}]], Letters(), CONFIG, 4)


def test_sequences_longer_than_the_model():
    with pytest.raises(CalibrationError, match=r"26 tokens; the model takes 24(.|\n)*--tokens 24"):
        text_batches(["a" * 25], Letters(), CONFIG, 256)
    assert text_batches(["a" * 25], Letters(), CONFIG, 24)


def test_a_tokenizer_of_another_model():
    with pytest.raises(CalibrationError, match=r"the id 28; the model has 20 embeddings"):
        text_batches(["z"], Letters(), CONFIG | {"vocab_size": 20}, 4)


VISION = {"image_size": 8, "num_channels": 1}


def test_images_become_channels_first():
    images = np.random.default_rng(0).random((9, 8, 8, 1), np.float32)
    made = image_batches(iter(images), VISION)
    assert [len(batch["pixel_values"]) for batch in made] == [8, 1]
    whole = torch.cat([batch["pixel_values"] for batch in made])
    np.testing.assert_array_equal(whole[:, 0].numpy(), images[..., 0])


def test_images_of_another_shape():
    with pytest.raises(CalibrationError, match=r"shape \[1, 6, 8\].*\n?.*takes \[1, 8, 8\]"):
        image_batches(iter(np.zeros((1, 6, 8, 1), np.float32)), VISION)


def test_a_processor_resizes_and_colours():
    pytest.importorskip("PIL")
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 8, "width": 8})
    images = np.ones((2, 5, 6, 1), np.float32)
    (batch,) = image_batches(iter(images), {"image_size": 8}, processor)
    # White, by the processor's mean and deviation of one half.
    torch.testing.assert_close(batch["pixel_values"], torch.ones(2, 3, 8, 8))


def test_a_processor_leaves_grey_what_a_grey_model_takes():
    pytest.importorskip("PIL")
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(do_resize=False, image_mean=[0.5], image_std=[0.5])
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 1)) / np.float32(255)
    (batch,) = image_batches(iter(images.astype(np.float32)), VISION, processor)
    expected = torch.from_numpy(images).permute(0, 3, 1, 2).float() * 2 - 1
    torch.testing.assert_close(batch["pixel_values"], expected)


def test_images_are_joined_and_none_is_lost():
    batches = [{"pixel_values": torch.full((4, 1, 2, 2), float(number))} for number in range(5)]
    made = joined(batches, 9)
    assert [len(batch["pixel_values"]) for batch in made] == [8, 8, 4]
    whole = torch.cat([batch["pixel_values"] for batch in made])
    assert torch.equal(whole, torch.cat([batch["pixel_values"] for batch in batches]))
    assert [len(batch["pixel_values"]) for batch in batches] == [4] * 5


def test_texts_are_not_joined():
    batches = [{"input_ids": torch.zeros(2, length)} for length in (3, 4)]
    assert joined(batches, 100) == batches


def test_images_of_any_size_fit_into_one_batch_or_are_refused():
    images = [np.zeros((4, size, 1), np.float32) for size in (4, 5)]
    with pytest.raises(CalibrationError, match="fit into no batch"):
        image_batches(images, {"num_channels": 1})
